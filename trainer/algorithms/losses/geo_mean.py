"""GMPO: the geometric mean of the clipped ratios of a sequence (Zhao et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals, whole_row_mean
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, row_mean

WEIGHT_EPS = 1e-10


def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode | None,
    config: AlgorithmConfig,
    rollout_is_weights: Tensor | None = None,
    *,
    loss_mask: Tensor | None = None,
    totals: Totals | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A_mean exp(mean of clipped log-ratios)`` per row, mean over rows; ``loss_agg_mode`` is not used.

    The log-ratio of a token is clipped to ``-low .. high``, pessimistically as in PPO: only where the clip lowers
    ``A ratio``. Importance weights enter by their geometric mean. A row must not be split over calls.

    Arguments and results: `PolicyLossFn`. Metrics: clip_fraction (tokens with A > 0 outside the clip range),
    clip_fraction_lower (those with A < 0) and the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    sign = terms.advantages.sign()
    bounded = terms.log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    log_ratio = sign * torch.minimum(sign * terms.log_ratio, sign * bounded)
    row_loss = -row_mean(terms.advantages, terms.mask) * row_mean(log_ratio, terms.mask).exp()
    if terms.weights is not None:
        row_loss = row_loss * row_mean((terms.weights + WEIGHT_EPS).log(), terms.mask).exp()
    loss = whole_row_mean(row_loss, terms.mask, terms.response_mask if loss_mask is None else loss_mask, totals)
    clipped = terms.log_ratio != bounded
    return loss, terms.metrics(
        clip_fraction=clipped & (terms.advantages > 0), clip_fraction_lower=clipped & (terms.advantages < 0)
    )
