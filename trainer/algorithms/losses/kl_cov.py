"""KL-Cov: tokens of high covariance get a KL penalty ("The entropy mechanism", Cui et al. 2025)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, by_covariance, covariances, marked, share_of
from agentgym.trainer.algorithms.masked import select


def kl_cov(
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
    """``-A ratio``, plus ``kl_cov_coef |l|`` on the tokens with the highest covariance of advantage and log-prob.

    These are ``kl_cov_ratio`` of all model tokens (at least one, none for a ratio of 0). Means and ranks are over this
    call, so unlike most losses this one depends on the split into micro-batches.

    Aggregated by ``token-mean`` by default. Arguments and results: `PolicyLossFn`. Metrics: penalty_fraction and the
    common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    position = by_covariance(terms, covariances(terms), terms.mask)
    number = share_of(terms.mask, config.kl_cov_ratio)
    penalised = marked(position[len(position) - number :], terms.mask)
    penalty = config.kl_cov_coef * terms.log_ratio.abs()
    token_loss = -terms.advantages * terms.ratio + select(penalty, penalised)
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    return loss, terms.metrics(penalty_fraction=penalised)
