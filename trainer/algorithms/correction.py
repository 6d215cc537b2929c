"""Correction of the mismatch between the engine that sampled and the trainer that recomputes, and of staleness.

Weights after Yao et al. 2025 (truncated importance sampling) and Liu et al. 2025 (masked importance sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import CorrectionConfig, Criterion
from agentgym.trainer.algorithms.kl import LOG_RATIO_BOUND, log_ratio
from agentgym.trainer.algorithms.losses.terms import row_mean
from agentgym.trainer.algorithms.masked import masked_mean, select


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Result of `rollout_correction`."""

    weights: Tensor | None
    """[B, T] factors for the policy loss, zero outside the mask; None if ``config.weights`` is ``none``."""
    response_mask: Tensor
    """[B, T] bool, without rejected tokens and rows."""
    loss_mask: Tensor
    """[B, T] bool, the response mask as it was: what the denominators of the loss count."""
    metrics: dict[str, float]
    """kl and k3 (engine || trainer), chi2_token, chi2_seq, ppl_ratio (trainer / engine, mean over rows), ess (0..1),
    logprob_gap_mean, logprob_gap_max, weight_mean, weight_max, rejected_fraction (tokens)."""


@torch.no_grad()
def rollout_correction(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: CorrectionConfig
) -> Corrected:
    """Importance weights trainer / engine, and rejection of tokens or rows that are too far off.

    Call it on the whole batch: normalisation and metrics are over all of it.

    Args:
        old_log_prob: [B, T], recomputed by the trainer before the first update.
        rollout_log_prob: [B, T], from the engine.
        response_mask: [B, T].
        config: what to apply.
    """
    given = response_mask.bool()
    mask = given & old_log_prob.isfinite() & rollout_log_prob.isfinite()
    gap = select(log_ratio(old_log_prob, rollout_log_prob), mask)
    kept = mask
    for criterion in config.criteria():
        kept = kept & _within(criterion, gap, mask)
    applied = _weights(gap, mask, config)
    return Corrected(
        weights=None if config.weights == "none" else applied,
        response_mask=kept,
        loss_mask=given,
        metrics={**_gap_metrics(gap, mask), **_weight_metrics(applied, mask, given, kept)},
    )


def _weights(gap: Tensor, mask: Tensor, config: CorrectionConfig) -> Tensor:
    if config.level == "sequence":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    weights = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if config.weights == "truncate":
        weights = weights.clamp(max=config.weight_high)
    elif config.weights == "mask":
        weights = select(weights, (weights >= config.weight_low) & (weights <= config.weight_high))
    if config.normalize:
        mean = masked_mean(weights, mask)
        weights = torch.where(mean > 0, weights / mean, weights)
    return select(weights, mask)


def _within(criterion: Criterion, gap: Tensor, mask: Tensor) -> Tensor:
    """[B, T] bool: what the criterion keeps."""
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if criterion.kind == "k1":
        low, high = torch.tensor([criterion.low, criterion.high], dtype=torch.float64).log().tolist()
        value = bounded
    else:
        low, high = -torch.inf, criterion.high
        value = bounded.square() / 2 if criterion.kind == "k2" else torch.expm1(bounded) - bounded
    if criterion.reduce in ("sum", "mean"):
        row = value.sum(-1) if criterion.reduce == "sum" else row_mean(value, mask)
        return _between(row, low, high)[:, None].expand_as(mask)
    inside = _between(value, low, high)
    if criterion.reduce == "max":
        return (inside | ~mask).all(-1, keepdim=True).expand_as(mask)
    return inside


def _between(x: Tensor, low: float, high: float) -> Tensor:
    return torch.logical_and(x >= low, x <= high)


def _gap_metrics(gap: Tensor, mask: Tensor) -> dict[str, float]:
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    rows = mask.any(-1)
    sequence = gap.sum(-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mean_gap = row_mean(gap, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "kl": float(masked_mean(-gap, mask)),
        "k3": float(masked_mean(torch.expm1(bounded) - bounded, mask)),
        "chi2_token": float(masked_mean((2 * bounded).exp() - 1, mask)),
        "chi2_seq": float(masked_mean((2 * sequence).exp() - 1, rows)),
        "ppl_ratio": float(masked_mean((-mean_gap).exp(), rows)),
        "logprob_gap_mean": float(masked_mean(gap.abs(), mask)),
        "logprob_gap_max": float(gap.abs().max()) if gap.numel() else 0.0,
    }


def _weight_metrics(weights: Tensor, mask: Tensor, given: Tensor, kept: Tensor) -> dict[str, float]:
    mean = masked_mean(weights, mask)
    spread = masked_mean((weights / mean.clamp(min=torch.finfo(weights.dtype).tiny)).square(), mask)
    return {
        "ess": float(1.0 / spread) if float(mean) > 0 else 0.0,
        "weight_mean": float(mean),
        "weight_max": float(weights.max()) if weights.numel() else 0.0,
        "rejected_fraction": float((given & ~kept).sum() / given.sum().clamp(min=1)),
    }
