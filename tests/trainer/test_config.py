"""The configuration of a training run: what is refused before anything starts, and that it is cheap to import."""

import subprocess
import sys
from typing import Any

import pytest

from agentgym.config import PRESETS, dump_config, load_config
from agentgym.errors import ConfigError
from agentgym.trainer.config import TrainConfig


def load(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, overrides=["env=calculator-math", *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.temperature=0"], ["rollout.temperature=0", "above 0"]),
        (["rollout.temperature=-1"], ["rollout.temperature=-1"]),
        (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "rollout.top_p=1"]),
        (["rollout.top_k=20"], ["rollout.top_k=20", "rollout.top_k=0"]),
        (["rollout.min_p=0.1"], ["'min_p'", "section 'rollout'"]),
        (["rollout.n=0"], ["rollout.n=0"]),
        (["rollout.n=1"], ["rollout.n=1", "'grpo'", "at least 2"]),
        (["trainer.total_steps=0"], ["trainer.total_steps=0", "greater than or equal to 1"]),
        (["trainer.total_steps=-3"], ["trainer.total_steps=-3"]),
        (["trainer.total_steps=5", "trainer.total_epochs=2"], ["total_steps=5", "total_epochs=2", "null"]),
        (
            ["data.batch_size=4", "rollout.n=8", "trainer.mini_batch_size=33"],
            ["trainer.mini_batch_size=33", "32 rollouts", "data.batch_size=4", "rollout.n=8"],
        ),
        (
            [
                "rollout.max_prompt_length=1000",
                "rollout.max_response_length=1000",
                "trainer.max_tokens_per_micro_batch=1999",
            ],
            ["max_tokens_per_micro_batch=1999", "2000"],
        ),
        (["trainer.cluster=inline", "trainer.workers=2"], ["trainer.cluster=inline", "trainer.workers=2"]),
        (["trainer.betas=[0.9, 1.5]"], ["trainer.betas", "[0.9, 1.5]"]),
        (["algo.policy_loss=dro"], ["dro_beta"]),
        (["algo=ppo", "critic.enabled=false"], ["critic.enabled=false", "'gae'"]),
        (["algo=dapo", "algo.overlong.buffer=500"], ["algo.overlong.buffer=500", "192 tokens"]),
        (["algo=ppo", "rollout.n=1", "algo.filter_groups.enabled=true"], ["rollout.n=1", "algo.filter_groups"]),
        (["algo=gpro"], ["algo=gpro", "Did you mean 'grpo'?"]),
        (["rollout=trch"], ["rollout.engine='trch'", "Did you mean 'torch'?"]),
        (["algo.loss_agg_mode=token-men"], ["'token-men'", "Did you mean 'token-mean'?"]),
        # names that other systems use
        (["trainer.learning_rate=1"], ["'trainer.lr'"]),
        (["num_generations=4"], ["'rollout.n'"]),
        (["algo.kl_coef=0.1"], ["'algo.kl_loss.coef'"]),
        (["seed=1"], ["'trainer.seed'"]),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refused(*overrides)
    assert [part for part in parts if part not in message] == []


def test_mini_batch_may_be_as_large_as_the_batch() -> None:
    config = load("data.batch_size=4", "rollout.n=8", "trainer.mini_batch_size=32")
    assert config.rollouts_per_step == 32


def test_the_environment_is_required() -> None:
    with pytest.raises(ConfigError, match=r"env=\.\.\. is missing.*env=calculator-math"):
        load_config(TrainConfig)


def test_a_sample_per_prompt_is_enough_for_advantages_without_groups() -> None:
    assert load("rollout.n=1", "algo.advantage=reinforce_plus_plus").rollout.n == 1


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["trainer.total_steps=9"], 9),
        (["trainer.total_steps=null"], 3),
        (["trainer.total_steps=null", "trainer.total_epochs=2"], 6),
    ],
)
def test_steps_come_from_steps_or_epochs_of_whole_batches(overrides: list[str], steps: int) -> None:
    assert load("data.batch_size=5", *overrides).num_steps(19) == steps


def test_the_data_follows_the_seed_of_the_run_unless_it_has_its_own() -> None:
    assert load("trainer.seed=3").data_seed == 3
    assert load("trainer.seed=3", "data.seed=0").data_seed == 0


def test_presets_of_the_shipped_model_apply_to_it_alone() -> None:
    tiny, other = load(), load("model=some/model")
    assert tiny.trainer.lr > other.trainer.lr
    assert tiny.rollout.max_prompt_length + tiny.rollout.max_response_length <= 2048
    assert other.trainer.total_steps is None


@pytest.mark.parametrize("path", sorted(PRESETS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_preset_is_valid(path: Any) -> None:
    assert load_config(TrainConfig, overrides=["env=x"], files=[path]).env.name == "x"


def test_a_dumped_run_loads_as_the_same_run(tmp_path: Any) -> None:
    config = load("env.digits=3", "trainer.betas=[0.8, 0.9]", "rollout.template_kwargs={enable_thinking: false}")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(TrainConfig, files=[file]) == config


def test_no_heavy_import() -> None:
    code = (
        "import sys, agentgym.trainer.config; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
