"""Workers that learn: one rank in this process, two ranks in Ray actors over gloo, same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import rollout, segment

from agentgym.config import load_config
from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.trainer import checkpoint
from agentgym.trainer.batch import Batch, make_batch
from agentgym.trainer.cluster import Cluster, InlineCluster, Needs, RayCluster
from agentgym.trainer.config import TrainConfig
from agentgym.trainer.groups import ActorGroup, WorkerGroup
from agentgym.trainer.main import models_per_gpu


def config(ranks: int | None, **overrides: Any) -> TrainConfig:
    settings = {
        "env": "calculator-math",
        "trainer.workers": ranks,
        "trainer.max_tokens_per_micro_batch": 900,
        "rollout.max_prompt_length": 128,
        "rollout.max_response_length": 128,
        "trainer.lr": 1e-3,
        "trainer.threads": 1,
        "trainer.step_timeout": 60,
        "algo.kl_loss.coef": 0.0,
        **overrides,
    }
    return load_config(
        TrainConfig, overrides=[f"{key}={value}" for key, value in settings.items() if value is not None]
    )


def batch(rows: int, seed: int = 0) -> Batch:
    rng = random.Random(seed)
    prompts = [[rng.randrange(300) for _ in range(rng.randrange(5, 60))] for _ in range(3)]
    rollouts = []
    for i in range(rows):
        length = rng.randrange(2, 60)
        mask = [1, *[rng.randrange(2) for _ in range(length - 2)], 1]
        ids = [rng.randrange(300) for _ in range(length)]
        rollouts.append(rollout(rng.random(), segment(prompts[i % 3], ids, mask), group=str(i % 3), sample=i))
    made = make_batch(rollouts)
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(rows, 1, generator=generator) * made["response_mask"]
    made["advantages"] = advantages
    made["returns"] = advantages
    return made


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(cpus=4, threads=1, plugins=[])
    yield cluster
    cluster.close()


@pytest.fixture
def inline() -> Iterator[InlineCluster]:
    cluster = InlineCluster()
    yield cluster
    cluster.close()


def trained(cluster: Cluster, ranks: int, data: Batch, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    group = ActorGroup(cluster, config(ranks, **overrides))
    group.ready()
    minis = [list(range(0, len(data), 2)), list(range(1, len(data), 2))] if len(data) > 1 else [[0]]
    before = group.log_probs(data)
    data = data.clone()
    data["old_log_probs"] = before
    metrics = group.update(data, minis, 1e-3)
    folder = checkpoint.save(tmp_path / str(ranks), 1, {}, group.save)
    return {"before": before, "metrics": metrics, "weights": group.weights(), "folder": folder, "group": group}


@pytest.mark.parametrize("rows", [7, 1])
def test_two_ranks_learn_what_one_rank_learns(
    ray_cluster: RayCluster, inline: InlineCluster, tmp_path: Path, rows: int
) -> None:
    # C8, C17, H1, H2: rows that do not divide, and fewer rows than ranks
    data = batch(rows)
    one = trained(inline, 1, data, tmp_path)
    two = trained(ray_cluster, 2, data, tmp_path)
    assert torch.allclose(one["before"], two["before"], atol=1e-5)
    assert one["metrics"]["actor/loss"] == pytest.approx(two["metrics"]["actor/loss"], abs=1e-5)
    assert one["metrics"]["actor/grad_norm"] == pytest.approx(two["metrics"]["actor/grad_norm"], rel=1e-4)
    assert one["metrics"]["actor/entropy"] == pytest.approx(two["metrics"]["actor/entropy"], rel=1e-4)
    assert one["weights"].keys() == two["weights"].keys()
    # Adam's first steps divide by the gradient's own size, so tiny differences of it show at the size of the step.
    for name, value in one["weights"].items():
        assert (value - two["weights"][name]).abs().mean() < 2e-5, name

    # G8: saved with two ranks, loaded with one: the next step is the same.
    two["group"].load_optimizer(two["folder"])
    again = ActorGroup(inline, config(1, model=two["folder"]))
    again.ready()
    again.load_optimizer(two["folder"])
    data["old_log_probs"] = one["before"]
    minis = [list(range(rows))]
    resumed, kept = again.update(data, minis, 1e-3), two["group"].update(data, minis, 1e-3)
    assert resumed["actor/loss"] == pytest.approx(kept["actor/loss"], abs=1e-5)
    for name, value in again.weights().items():
        assert (value - two["group"].weights()[name]).abs().mean() < 2e-5, name
    two["group"].group.close()


def test_the_micro_batch_cap_does_not_change_what_is_learned(inline: InlineCluster, tmp_path: Path) -> None:
    # C8
    data = batch(9, seed=3)
    small = trained(inline, 1, data, tmp_path / "a", **{"trainer.max_tokens_per_micro_batch": 256})
    large = trained(inline, 1, data, tmp_path / "b", **{"trainer.max_tokens_per_micro_batch": 5000})
    assert small["metrics"]["actor/loss"] == pytest.approx(large["metrics"]["actor/loss"], abs=1e-5)
    assert small["metrics"]["actor/grad_norm"] == pytest.approx(large["metrics"]["actor/grad_norm"], rel=1e-4)


def test_a_saved_model_loads_with_transformers_and_is_the_same(inline: InlineCluster, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = trained(inline, 1, batch(4), tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(done["folder"] / "model", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(done["folder"] / "model").chat_template
    state = lm.state_dict()
    assert all(torch.equal(state[name], value) for name, value in done["weights"].items())


def fragile() -> type:
    """A local class, so that Ray sends its code and workers need not import this file."""

    class Fragile:
        """A worker that fails on one rank while the others go on."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def work(self) -> int:
            if self.rank == 1:
                raise AgentGymError("rank 1 is broken")
            return self.rank

        def hang(self) -> None:
            import threading

            threading.Event().wait(30)

        def die(self) -> None:
            import os

            os._exit(1)

    return Fragile


def test_the_error_of_one_rank_reaches_the_driver(ray_cluster: RayCluster) -> None:
    group = WorkerGroup(ray_cluster, fragile(), (), Needs(ranks=2, cpus=0.5), name="fragile", timeout=20)
    with pytest.raises(AgentGymError, match="rank 1 is broken") as caught:
        group.broadcast("work")
    assert any("fragile.work" in note and "in work" in note for note in caught.value.__notes__)
    group.timeout = 0.5
    with pytest.raises(InfraError, match=r"fragile.hang did not end within 0 s .2 of 2 workers"):
        group.broadcast("hang")
    group.close()


def test_a_dead_worker_is_an_infrastructure_error(ray_cluster: RayCluster) -> None:
    group = WorkerGroup(ray_cluster, fragile(), (), Needs(ranks=1, cpus=0.5), name="mortal", timeout=30)
    with pytest.raises(InfraError, match=r"died during mortal.die"):
        group.broadcast("die")


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ({}, 0, 1),
        ({}, 1, 1),
        ({"algo": "ppo"}, 0, 1),
        ({"algo": "ppo"}, 1, 2),
        ({"algo": "ppo"}, 2, 1),
        ({"algo": "ppo", "algo.kl_loss.coef": 0.1}, 2, 3),
        ({"algo": "ppo", "trainer.gpus": 2}, 2, 2),
        ({"algo": "ppo", "trainer.gpus": 2}, 4, 1),
        ({"algo": "ppo", "rollout": "vllm", "rollout.vllm.colocate": False}, 2, 2),
        ({"algo": "ppo", "rollout": "vllm", "rollout.vllm.colocate": False}, 3, 1),
    ],
)
def test_models_share_gpus_where_there_are_too_few(overrides: dict[str, Any], gpus: int, expected: int) -> None:
    cluster = InlineCluster()
    cluster.gpus = gpus
    assert models_per_gpu(config(None, **overrides), cluster) == expected


def test_every_trainer_process_needs_a_gpu() -> None:
    cluster = InlineCluster()
    with pytest.raises(ConfigError, match=r"trainer\.gpus=8: every trainer process takes a GPU, and there are 0"):
        models_per_gpu(config(None, **{"trainer.gpus": 8}), cluster)
    cluster.gpus = 2
    with pytest.raises(ConfigError, match=r"trainer\.workers=4: .* there are 2"):
        models_per_gpu(config(4), cluster)


def test_the_gpus_are_the_number_of_processes() -> None:
    assert config(None, **{"trainer.gpus": 8}).trainer.workers == 8
    with pytest.raises(ConfigError, match=r"trainer\.gpus=8 means a process on each GPU, but trainer\.workers=4"):
        config(4, **{"trainer.gpus": 8})
