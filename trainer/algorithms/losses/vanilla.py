"""PPO's clipped loss (Schulman et al. 2017) with the dual clip (Ye et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, clip_ratio


def vanilla(
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
    """``max(-A ratio, -A clip(ratio))``; where A < 0 at most ``-A c``. Aggregated by ``token-mean`` by default.

    Arguments and results: `PolicyLossFn`. Metrics: clip_fraction, clip_fraction_lower (dual clip) and the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    plain = -terms.advantages * terms.ratio
    clipped = -terms.advantages * clip_ratio(terms.ratio, config)
    larger = torch.maximum(plain, clipped)
    bound = -terms.advantages * config.clip_ratio_c
    negative = terms.advantages < 0
    token_loss = torch.where(negative, torch.minimum(larger, bound), larger)
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    metrics = terms.metrics(clip_fraction=clipped > plain, clip_fraction_lower=negative & (larger > bound))
    return loss, metrics
