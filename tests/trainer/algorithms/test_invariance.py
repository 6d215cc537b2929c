"""What must not matter: observation tokens, row order, padding, garbage outside the mask, the micro-batch split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentgym.trainer.algorithms import (
    AlgorithmConfig,
    Totals,
    get_advantage,
    get_policy_loss,
    list_advantages,
    list_policy_losses,
)
from agentgym.trainer.algorithms.config import LossAggMode

SPLIT_DEPENDENT = {"clip_cov", "kl_cov"}
GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -3.0])
NUMBERS = st.floats(-2.0, 2.0, width=16)
EXAMPLES = settings(max_examples=25, deadline=None)


@dataclass
class Batch:
    """Rows as lists of tokens; what a token holds is (reward, value, turn), None for an observation."""

    rows: list[list[tuple[float, float, int] | None]]
    index: list[int]
    baselines: list[float]

    def advantages(self, name: str, *, width: int = 0, garbage: float = 0.0) -> list[list[float]]:
        """Advantages of the model tokens of each row, computed in a tensor at least ``width`` wide."""
        width = max(width, *(len(row) for row in self.rows), 1)
        mask = torch.zeros(len(self.rows), width)
        rewards, values = torch.full((2, len(self.rows), width), garbage)
        turns = torch.full((len(self.rows), width), -5)
        for i, row in enumerate(self.rows):
            for t, token in enumerate(row):
                if token is not None:
                    mask[i, t] = 1.0
                    rewards[i, t], values[i, t], turns[i, t] = token
        config = AlgorithmConfig(gamma=0.9, lam=0.8)
        advantages, returns = get_advantage(name)(
            rewards,
            mask,
            self.index,
            values=values,
            reward_baselines=torch.tensor(self.baselines),
            turn_index=turns,
            config=config,
        )
        for result in (advantages, returns):
            assert bool(result.isfinite().all())
            assert float((result * (1 - mask)).abs().sum()) == 0.0
        return [advantages[i][mask[i].bool()].tolist() for i in range(len(self.rows))]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    token = st.one_of(st.none(), st.tuples(st.sampled_from([0.0, 0.0, 1.0, 0.5]), NUMBERS, st.integers(0, 2)))
    rows = draw(st.lists(st.lists(token, max_size=8), min_size=1, max_size=6))
    index = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    return Batch(rows, index, draw(st.lists(NUMBERS, min_size=len(rows), max_size=len(rows))))


def same(actual: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(e), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list_advantages())
@EXAMPLES
@given(batches(), st.data())
def test_observation_tokens_can_be_inserted_deleted_and_changed(name: str, batch: Batch, data: st.DataObject) -> None:
    expected = batch.advantages(name)
    without = replace(batch, rows=[[t for t in row if t is not None] for row in batch.rows])
    same(without.advantages(name), expected)
    longer = []
    for row in without.rows:
        row = list(row)
        for _ in range(data.draw(st.integers(0, 4))):
            row.insert(data.draw(st.integers(0, len(row))), None)
        longer.append(row)
    same(replace(batch, rows=longer).advantages(name, garbage=data.draw(GARBAGE)), expected)


@pytest.mark.parametrize("name", list_advantages())
@EXAMPLES
@given(batches(), st.data())
def test_row_order_does_not_matter(name: str, batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch.rows))))
    expected = batch.advantages(name)
    permuted = Batch(
        [batch.rows[i] for i in order], [batch.index[i] for i in order], [batch.baselines[i] for i in order]
    )
    same(permuted.advantages(name), [expected[i] for i in order])


@pytest.mark.parametrize("name", list_advantages())
@EXAMPLES
@given(batches(), st.integers(9, 200), GARBAGE)
def test_padding_width_and_garbage_do_not_matter(name: str, batch: Batch, width: int, garbage: float) -> None:
    same(batch.advantages(name, width=width, garbage=garbage), batch.advantages(name))


def loss_inputs(rows: int, width: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(rows, width, generator=generator)

    old = -2 * draw()
    return {
        "old_log_prob": old,
        "log_prob": old + draw() - 0.5,
        "advantages": (2 * draw()[:, :1] - 1).expand(rows, width).clone(),
        "response_mask": (draw() < 0.6).float(),
        "rollout_is_weights": 0.5 + draw(),
    }


def loss_and_gradient(name: str, mode: LossAggMode, inputs: Mapping[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    log_prob = inputs["log_prob"].clone().requires_grad_()
    config = AlgorithmConfig(dro_beta=0.1, norm_length=7, clip_cov_low=0.0, clip_cov_ratio=0.1, kl_cov_ratio=0.1)
    arguments: dict[str, Any] = {**inputs, "log_prob": log_prob, "loss_agg_mode": mode, "config": config, **more}
    loss, _ = get_policy_loss(name)(**arguments)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


MODES = st.sampled_from(
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)


@pytest.mark.parametrize("name", sorted(set(list_policy_losses()) - SPLIT_DEPENDENT))
@EXAMPLES
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10_000), MODES, st.data())
def test_loss_and_gradient_do_not_depend_on_the_split(
    name: str, rows: int, width: int, seed: int, mode: LossAggMode, data: st.DataObject
) -> None:
    inputs = loss_inputs(rows, width, seed)
    loss, gradient = loss_and_gradient(name, mode, inputs)
    part_of_row = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    totals = Totals.of(inputs["response_mask"])
    shares, gradients = torch.zeros(()), torch.zeros_like(gradient)
    for part in range(3):
        chosen = torch.tensor([p == part for p in part_of_row])
        share, of_part = loss_and_gradient(name, mode, {k: v[chosen] for k, v in inputs.items()}, totals=totals)
        shares = shares + share
        gradients[chosen] = of_part
    torch.testing.assert_close(shares, loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list_policy_losses())
@EXAMPLES
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10_000), MODES, GARBAGE, st.data())
def test_loss_does_not_see_padding_row_order_or_garbage(
    name: str, rows: int, width: int, seed: int, mode: LossAggMode, garbage: float, data: st.DataObject
) -> None:
    inputs = loss_inputs(rows, width, seed)
    loss, gradient = loss_and_gradient(name, mode, inputs)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    pad = (0, data.draw(st.integers(0, 3)), 0, data.draw(st.integers(0, 2)))
    mask = torch.nn.functional.pad(inputs["response_mask"][order], pad)
    changed = {k: torch.nn.functional.pad(v[order], pad).masked_fill(mask == 0, garbage) for k, v in inputs.items()}
    changed["response_mask"] = mask
    other_loss, other_gradient = loss_and_gradient(name, mode, changed)
    torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other_gradient[:rows, :width], gradient[order], rtol=1e-4, atol=1e-6)
    assert float((other_gradient * (1 - mask)).abs().sum()) == 0.0
