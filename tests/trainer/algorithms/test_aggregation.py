from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import Totals, aggregate_loss
from agentgym.trainer.algorithms.config import LossAggMode

EXPECTED: dict[LossAggMode, float] = {
    "token-mean": 2.5,
    "seq-mean-token-sum": 10.0,
    "seq-mean-token-mean": 2.0,
    "seq-mean-token-sum-norm": 1.25,
}


def two_sequences(copies: int = 1) -> tuple[Tensor, Tensor]:
    """Sequence A: 2 tokens of loss 1.0; sequence B: 6 tokens of loss 3.0."""
    loss = torch.tensor([[1.0] * 8, [3.0] * 8])
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 6 + [0] * 2])
    return loss.repeat(copies, 1), mask.repeat(copies, 1)


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize(
    ("copies", "ranks_of_micro_batches"),
    [
        (1, [[[0, 1]]]),
        (1, [[[0], [1]]]),
        (1, [[[0]], [[1]]]),
        (2, [[[0], [1]], [[2], [3]]]),
        (2, [[[0, 2], [1]], [[3]]]),
    ],
)
def test_value_and_gradient_do_not_depend_on_the_split(  # C8
    mode: LossAggMode, copies: int, ranks_of_micro_batches: list[list[list[int]]]
) -> None:
    loss, mask = two_sequences(copies)
    totals = sum((Totals.of(mask[i : i + 1]) for i in range(len(mask))), Totals(0, 0))
    leaf = loss.clone().requires_grad_()
    shares = [
        aggregate_loss(leaf[rows], mask[rows], mode, totals=totals, norm_length=8)
        for micro_batches in ranks_of_micro_batches
        for rows in micro_batches
    ]
    (gradient,) = torch.autograd.grad(torch.stack(shares).sum(), leaf)
    assert torch.stack(shares).sum().item() == pytest.approx(EXPECTED[mode])

    whole = loss.clone().requires_grad_()
    value = aggregate_loss(whole, mask, mode, norm_length=8)
    assert value.item() == pytest.approx(EXPECTED[mode])
    torch.testing.assert_close(gradient, torch.autograd.grad(value, whole)[0])


def test_padding_rows_and_padding_width_do_not_count() -> None:  # C17
    loss, mask = two_sequences()
    padded = torch.nn.functional.pad(loss, (0, 5, 0, 3), value=float("nan"))
    padded_mask = torch.nn.functional.pad(mask, (0, 5, 0, 3))
    for mode, expected in EXPECTED.items():
        assert float(aggregate_loss(padded, padded_mask, mode, norm_length=8)) == pytest.approx(expected)
    assert Totals.of(padded_mask) == Totals(tokens=8, rows=2)


def test_ten_rows_padded_for_four_ranks_give_the_gradient_of_ten_rows() -> None:  # C17
    loss, mask = torch.arange(20.0).view(10, 2), torch.ones(10, 2)
    whole = loss.clone().requires_grad_()
    (expected,) = torch.autograd.grad(aggregate_loss(whole, mask, "seq-mean-token-mean"), whole)

    padded = torch.cat([loss, torch.zeros(2, 2)]).requires_grad_()
    padded_mask = torch.cat([mask, torch.zeros(2, 2)])
    totals = Totals.of(padded_mask)
    assert totals == Totals(tokens=20, rows=10)
    shares = [
        aggregate_loss(padded[i : i + 3], padded_mask[i : i + 3], "seq-mean-token-mean", totals=totals)
        for i in range(0, 12, 3)
    ]
    (gradient,) = torch.autograd.grad(torch.stack(shares).sum(), padded)
    torch.testing.assert_close(gradient[:10], expected)
    assert gradient[10:].abs().max() == 0.0


def test_token_sum_is_the_plain_sum() -> None:
    loss, mask = two_sequences()
    assert float(aggregate_loss(loss, mask, "token-sum")) == 20.0


def test_rejected_tokens_stop_contributing_but_still_count() -> None:
    loss, loss_mask = two_sequences()
    mask = loss_mask.clone()
    mask[1, 3:] = 0
    assert float(aggregate_loss(loss, mask, "token-mean", loss_mask=loss_mask)) == pytest.approx((2 + 9) / 8)
    assert float(aggregate_loss(loss, mask, "seq-mean-token-mean", loss_mask=loss_mask)) == pytest.approx((1 + 1.5) / 2)
    mask[1] = 0
    assert float(aggregate_loss(loss, mask, "seq-mean-token-sum", loss_mask=loss_mask)) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", [*EXPECTED, "token-sum"])
def test_an_empty_micro_batch_gives_zero_with_a_graph(mode: LossAggMode) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    value = aggregate_loss(loss, torch.zeros(2, 3), mode, totals=Totals(8, 2), norm_length=8)
    (gradient,) = torch.autograd.grad(value, loss)
    assert value.item() == 0.0
    assert gradient.abs().max() == 0.0


def test_half_precision_is_summed_in_float32() -> None:
    value = aggregate_loss(torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096), "token-sum")
    assert value.dtype == torch.float32
    assert float(value) == 4096.0


def test_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'token_mean'.*Did you mean 'token-mean'"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")  # type: ignore[arg-type]


def test_fixed_length_norm_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="norm_length"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm")
