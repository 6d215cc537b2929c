"""Plain policy gradient, as in GPG (Chu et al. 2025)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms


def gpg(
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
    """``-A lp``, aggregated by ``token-mean`` by default.

    Arguments and results: `PolicyLossFn`. Metrics: the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    token_loss = -terms.log_prob * terms.advantages
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    return loss, terms.metrics()
