from __future__ import annotations

import math

import pytest
import torch

from agentgym.trainer.algorithms import Totals, explained_variance, value_loss

T = torch.tensor


def test_the_larger_of_plain_and_clipped_error_counts() -> None:
    value = T([[1.0, 0.5]], requires_grad=True)
    loss, metrics = value_loss(value, T([[2.0, 0.5]]), T([[0.0, 0.5]]), torch.ones(1, 2), 0.2, "token-mean")
    assert loss.item() == pytest.approx(0.5 * (2.0 - 0.2) ** 2 / 2)
    assert torch.autograd.grad(loss, value)[0].tolist() == [[0.0, 0.0]]
    assert float(metrics["clip_fraction"]) == 0.5
    assert float(metrics["value_mean"]) == 0.75
    assert float(metrics["return_mean"]) == 1.25


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_masked_positions_do_not_matter(garbage: float) -> None:
    value = T([[1.0, garbage, 0.5]], requires_grad=True)
    other = T([[2.0, garbage, 0.5]])
    loss, metrics = value_loss(value, other, T([[1.0, garbage, 0.5]]), T([[1, 0, 1]]), 0.2, "token-mean")
    assert loss.item() == pytest.approx(0.25)
    assert torch.autograd.grad(loss, value)[0].tolist() == [[-0.5, 0.0, 0.0]]
    assert float(metrics["nonfinite_fraction"]) == 0.0


def test_a_target_that_is_not_finite_is_left_out_and_counted() -> None:
    value = T([[1.0, 3.0]], requires_grad=True)
    loss, metrics = value_loss(value, T([[2.0, math.nan]]), T([[1.0, 3.0]]), torch.ones(1, 2), 0.2, "token-mean")
    assert loss.item() == pytest.approx(0.25)
    assert torch.autograd.grad(loss, value)[0].isfinite().all()
    assert float(metrics["nonfinite_fraction"]) == 0.5


def test_shares_add_up() -> None:
    torch.manual_seed(0)
    value, target, old = torch.randn(3, 4, 5)
    mask = (torch.rand(4, 5) < 0.6).float()
    whole, _ = value_loss(value, target, old, mask, 0.2, "seq-mean-token-mean")
    shares = [
        value_loss(value[r], target[r], old[r], mask[r], 0.2, "seq-mean-token-mean", totals=Totals.of(mask))[0]
        for r in ([0], [1, 2, 3])
    ]
    torch.testing.assert_close(sum(shares), whole)


def test_explained_variance() -> None:
    returns, mask = T([[1.0, math.nan, 3.0]]), T([[1, 0, 1]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(T([[2.0, 0.0, 2.0]]), returns, mask) == 0.0
    assert explained_variance(T([[3.0, 0.0, 1.0]]), returns, mask) == -3.0
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0.0
