"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals, aggregate_loss
from agentgym.trainer.algorithms.config import LossAggMode
from agentgym.trainer.algorithms.masked import masked_var, select, working


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    response_mask: Tensor,
    clip_range: float,
    loss_agg_mode: LossAggMode,
    *,
    loss_mask: Tensor | None = None,
    totals: Totals | None = None,
    norm_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``0.5 agg(max((v - R)^2, (clip(v, v_old +- clip_range) - R)^2))`` (PPO's clipped value loss).

    Args:
        values: [B, T], current; the gradient flows into it.
        returns: [B, T], regression target.
        old_values: [B, T], values at the time of the rollout.
        response_mask: [B, T].
        clip_range: distance from the old value beyond which the prediction is clipped.
        loss_agg_mode, loss_mask, totals, norm_length: see `aggregate_loss`.

    Returns:
        loss: scalar, a share if ``totals`` is given.
        metrics: means over the response mask (combine with `MetricMeans`): clip_fraction, value_mean, return_mean,
            nonfinite_fraction (tokens left out because a number on them is not finite).
    """
    given = response_mask.bool()
    mask = given & values.detach().isfinite() & returns.isfinite() & old_values.isfinite()
    value, target, old = (select(working(x), mask) for x in (values, returns.detach(), old_values.detach()))
    plain = (value - target).square()
    clipped = (torch.maximum(torch.minimum(value, old + clip_range), old - clip_range) - target).square()
    loss = 0.5 * aggregate_loss(
        torch.maximum(plain, clipped),
        mask,
        loss_agg_mode,
        loss_mask=given if loss_mask is None else loss_mask,
        totals=totals,
        norm_length=norm_length,
    )
    tokens = given.sum().clamp(min=1)
    return loss, {
        "clip_fraction": (mask & (clipped > plain)).sum() / tokens,
        "value_mean": value.detach().sum() / tokens,
        "return_mean": target.sum() / tokens,
        "nonfinite_fraction": (given & ~mask).sum() / tokens,
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - var(R - V) / var(R)`` over the masked tokens of a whole batch; 0.0 where the returns do not vary.

    Args:
        values, returns, mask: [B, T].
    """
    total = masked_var(returns.double(), mask)
    if float(total) == 0.0:
        return 0.0
    return float(1.0 - masked_var(returns.double() - values.double(), mask) / total)
