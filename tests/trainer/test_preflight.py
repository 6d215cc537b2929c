"""What is checked of a run before anything starts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.errors import ConfigError
from agentgym.evaluation_config import EvalConfig
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.models import shipped_model
from agentgym.trainer.preflight import check_evaluation, check_run

TOY = Path(__file__).parents[1] / "agentgym" / "cli" / "toy_env.py"


def config(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, overrides=["env=toy-sums", f"plugins={TOY}", *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(config(*overrides))
    return str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the shipped model."""
    source = shipped_model("tiny")
    assert source is not None
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    return folder


def test_a_checked_run_says_what_it_amounts_to(model: Path) -> None:
    check = check_run(config("env.size=30", "data.val_size=10", "trainer.total_steps=null", f"model={model}"))
    assert (check.train_tasks, check.val_tasks, check.steps) == (30, 10, 1)
    assert check.model == str(model)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        # E9
        (["env.size=5", "data.batch_size=8"], ["data.batch_size=8", "5 training tasks"]),
        (["data.train_size=5", "data.batch_size=8"], ["data.batch_size=8", "5 training tasks", "train_size=5 of 20"]),
        # F6
        (["env=toy-sum", "env.digits=3"], ["'toy-sum'", "'toy-sums'", "calculator-math"]),
        (["env.sizes=3"], ["'sizes'", "'size'", "selection"]),
        (["env.max_turn=3"], ["env.max_turn:", "env.max_turns"]),
        (["env.size=0"], ["env.size=0", "expected at least 1"]),
        (["env.size=x"], ["env.size=x"]),
        # E5
        (["env.selection=adder"], ["train-0", "'adder'", "'add'"]),
        (["rollout.agent_loop=tool_agnt"], ["rollout.agent_loop=tool_agnt", "'tool_agent'", "single_turn"]),
        (["rollout.agent_loop={k: 1}"], ["rollout.agent_loop", "_target_"]),
        (["rollout.agent_loop._target_=json:nope"], ["rollout.agent_loop", "'nope'"]),
        (["rollout.parser=herms"], ["rollout.parser=herms", "'hermes'"]),
        (["algo.advantage=grop"], ["algo.advantage=grop", "'grpo'", "rloo"]),
        (["algo.policy_loss=vanila"], ["algo.policy_loss=vanila", "'vanilla'"]),
        (["trainer.replay=nowhere"], ["trainer.replay=nowhere", "no run with rollouts", "step-000001.jsonl"]),
        (["reward=score.py:f"], ["reward.path", "score.py"]),
        (["plugins=no_such_module"], ["no_such_module"]),
        (["plugins=no/such/file.py"], ["no/such/file.py"]),
        (["trainer.name=../up"], ["trainer.name", "'../up'", "trainer.run_dir"]),
        ([f"trainer.run_dir={TOY}"], ["trainer.run_dir", "is a file"]),
        (["model=./nope"], ["model=./nope", "no such folder", "tiny"]),
        (["rollout.max_response_length=4000"], ["max_response_length", "2048", "'tiny'"]),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refused(*overrides)
    assert [part for part in parts if part not in message] == []


def test_a_plugin_that_fails_to_import_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('my fault')\n")
    with pytest.raises(ConfigError, match="my fault"):
        check_run(load_config(TrainConfig, overrides=["env=toy-sums", f"plugins={tmp_path / 'broken.py'}"]))


def test_a_model_folder_needs_config_tokenizer_and_chat_template(model: Path) -> None:
    assert check_run(config(f"model={model}")).model == str(model)
    (model / "chat_template.jinja").unlink()
    assert "chat template" in refused(f"model={model}")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    assert check_run(config(f"model={model}")).model == str(model)
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in refused(f"model={model}")
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(f"model={model}")
    (model / "config.json").unlink()
    assert "without config.json" in refused(f"model={model}")


def test_the_weights_and_the_tokenizer_must_be_readable(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:1000])
    assert "model.safetensors is not a readable file of weights" in refused(f"model={model}")
    (model / "model.safetensors").unlink()
    assert "no weights in" in refused(f"model={model}")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    (model / "part-1.safetensors").write_bytes(whole)
    assert "part-2.safetensors is missing" in refused(f"model={model}")
    (model / "part-2.safetensors").write_bytes(whole)
    assert check_run(config(f"model={model}")).model == str(model)
    index.write_text("[]")
    assert "index.json cannot be read" in refused(f"model={model}")
    index.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    (model / "tokenizer.json").write_text('{"model": 3}')
    message = refused(f"model={model}")
    assert "tokenizer.json is not a readable tokenizer" in message
    assert "\n" not in message


def test_a_mistyped_model_folder_names_its_neighbour(model: Path) -> None:
    assert f"Did you mean '{model}'?" in refused(f"model={model}s")


def test_an_evaluation_is_checked_likewise() -> None:
    def check(*overrides: str) -> None:
        check_evaluation(load_config(EvalConfig, overrides=["env=toy-sums", f"plugins={TOY}", *overrides]))

    check()
    check("agent=oracle", "model=./nope")  # the model is not used
    with pytest.raises(ConfigError, match="no such folder"):
        check("model=./nope")
    with pytest.raises(ConfigError, match="'toy-sums'"):
        check("env=toy-sms")


def test_no_heavy_import() -> None:
    code = (
        "import sys; from agentgym.config import load_config; from agentgym.trainer.config import TrainConfig\n"
        "from agentgym.trainer.preflight import check_run\n"
        f"check_run(load_config(TrainConfig, overrides=['env=toy-sums', 'plugins={TOY}']))\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_on_an_unknown_machine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    overrides = ["env=toy-sums", f"plugins={TOY}", "model=gpt"]
    with pytest.raises(ConfigError, match=r"no machine of the name 'no-such-host\.invalid' is known"):
        check_evaluation(load_config(EvalConfig, overrides=[*overrides, "endpoint=http://no-such-host.invalid/v1"]))
    check_evaluation(load_config(EvalConfig, overrides=[*overrides, "endpoint=127.0.0.1:1/v1"]))
