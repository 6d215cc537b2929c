"""CISPO: clipped importance weights on REINFORCE (MiniMax-M1, 2025)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, clip_ratio


def cispo(
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
    """``-stopgrad(clip(ratio)) A lp``: clipping bounds a token's weight but never removes its gradient.

    Aggregated by ``token-mean`` by default.

    Arguments and results: `PolicyLossFn`. Metrics: clip_fraction and the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    clipped = clip_ratio(terms.ratio, config).detach()
    token_loss = -clipped * terms.advantages * terms.log_prob
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    return loss, terms.metrics(clip_fraction=clipped != terms.ratio)
