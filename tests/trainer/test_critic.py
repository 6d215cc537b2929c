"""The critic: the same numbers for one rank and two and for every split, and only model tokens with a return count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_groups import batch, config

from agentgym.trainer import checkpoint
from agentgym.trainer.algorithms import AlgorithmConfig, explained_variance, get_advantage
from agentgym.trainer.batch import Batch
from agentgym.trainer.cluster import Cluster, InlineCluster, RayCluster
from agentgym.trainer.groups import CriticGroup


@pytest.fixture
def inline() -> Iterator[InlineCluster]:
    cluster = InlineCluster()
    yield cluster
    cluster.close()


def critic(cluster: Cluster, ranks: int = 1, **overrides: Any) -> CriticGroup:
    group = CriticGroup(cluster, config(ranks, algo="ppo", **overrides))
    group.ready()
    return group


def returns_of(data: Batch) -> Batch:
    """The batch with values of 0 and the returns of its rewards."""
    data["values"] = torch.zeros(data["response_mask"].shape)
    _, data["returns"] = get_advantage("gae")(
        data["token_level_rewards"],
        data["response_mask"],
        data["group"],
        values=data["values"],
        valid=data["valid"],
        config=AlgorithmConfig(),
    )
    return data


def learned(group: CriticGroup, data: Batch, steps: int = 2, lr: float = 1e-3) -> dict[str, Any]:
    rows = list(range(len(data)))
    metrics = group.update(data, [rows[::2] or rows, rows[1::2] or rows] * steps, lr)
    return {"metrics": metrics, "values": group.values(data)}


@pytest.mark.parametrize("rows", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_learn_what_one_rank_learns(inline: InlineCluster, tmp_path: Path, rows: int) -> None:
    # C8, C17, H1, H2, G8
    data = returns_of(batch(rows))
    one = learned(critic(inline), data)
    cluster = RayCluster(cpus=4, threads=1, plugins=[])
    try:
        group = critic(cluster, 2)
        assert torch.equal(group.values(data), torch.zeros(data["values"].shape))  # the head starts at zero
        two = learned(group, data)
        assert one["metrics"]["critic/loss"] == pytest.approx(two["metrics"]["critic/loss"], abs=1e-5)
        assert one["metrics"]["critic/grad_norm"] == pytest.approx(two["metrics"]["critic/grad_norm"], rel=1e-3)
        assert one["metrics"].keys() == two["metrics"].keys()
        assert (one["values"] - two["values"]).abs().max() < 1e-3
        folder = checkpoint.save(tmp_path, 1, {}, group.save)
        again = critic(inline)
        again.load(folder)
        assert torch.allclose(again.values(data), two["values"], atol=1e-5)
        went_on, resumed = learned(group, data, steps=1), learned(again, data, steps=1)
        assert resumed["metrics"]["critic/loss"] == pytest.approx(went_on["metrics"]["critic/loss"], abs=1e-5)
        assert torch.allclose(resumed["values"], went_on["values"], atol=1e-3)
    finally:
        cluster.close()


def test_the_split_into_micro_batches_does_not_change_what_is_learned(inline: InlineCluster) -> None:
    # C8
    data = returns_of(batch(9, seed=3))
    small = learned(critic(inline, **{"trainer.max_tokens_per_micro_batch": 256}), data, steps=1)
    large = learned(critic(inline, **{"trainer.max_tokens_per_micro_batch": 5000}), data, steps=1)
    for name in ("critic/loss", "critic/grad_norm", "critic/value_mean", "critic/return_mean"):
        assert small["metrics"][name] == pytest.approx(large["metrics"][name], rel=1e-3, abs=1e-5), name


def test_observations_and_rows_without_a_reward_teach_nothing(inline: InlineCluster) -> None:
    # C6, C12
    data = returns_of(batch(6))
    spoiled = data.clone()
    outside = ~spoiled["response_mask"]
    for name in ("returns", "values"):
        spoiled[name][outside] = 1e6
    group, other = critic(inline), critic(inline)
    plain, same = learned(group, data, steps=1), learned(other, spoiled, steps=1)
    assert plain["metrics"] == same["metrics"]
    assert torch.equal(plain["values"], same["values"])

    data["valid"][2:] = False
    data["returns"][2:] = 0.0  # as the advantages leave them
    rest = data[:2].clone()
    masked = critic(inline).update(data, [list(range(6))], 1e-3)
    alone = critic(inline).update(rest, [[0, 1]], 1e-3)
    assert masked["critic/loss"] == pytest.approx(alone["critic/loss"], rel=1e-5)
    assert masked["critic/grad_norm"] == pytest.approx(alone["critic/grad_norm"], rel=1e-4)


def test_a_critic_learns_what_to_expect(inline: InlineCluster) -> None:
    data = returns_of(batch(8, seed=1))
    group = critic(inline, **{"algo.value_clip": 100.0})
    first = group.update(data, [list(range(8))], 1e-3)["critic/loss"]
    last = group.update(data, [list(range(8))] * 60, 1e-3)
    assert first > 0.05
    assert explained_variance(group.values(data), data["returns"], data["response_mask"]) > 0.9
    assert last["critic/value_mean"] != 0.0


def test_the_shared_layout_gives_the_values_of_the_padded_one() -> None:
    from agentgym.trainer.model import load_causal_lm
    from agentgym.trainer.policy import ValueModel

    pieces = [
        (torch.tensor([5, 6, 7]), [torch.tensor([8, 9]), torch.tensor([10, 11, 12, 13])]),
        (torch.tensor([3]), [torch.tensor([4, 5, 6])]),
    ]
    results = []
    for shared in (True, False):
        model = ValueModel(load_causal_lm("tiny", dtype="float32"), shared_prompts=shared)
        torch.nn.init.constant_(model.head.weight, 0.1)
        results.append(model(model.pack(pieces)))
    assert len(results[0]) == 9
    assert results[0].std() > 0
    assert torch.allclose(*results, atol=1e-5)
