"""Direct reward optimisation: off-policy with a quadratic penalty (Richemond et al. 2024)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms


def dro(
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
    """``-(lp A - beta/2 l^2)`` with l = log-ratio, aggregated by ``token-mean`` by default.

    Arguments and results: `PolicyLossFn`. Metrics: the common ones. Raises `ConfigError` unless ``dro_beta > 0``.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    if config.dro_beta is None or config.dro_beta <= 0:
        raise ConfigError(f"policy loss 'dro' needs dro_beta above 0, got {config.dro_beta!r}; set algo.dro_beta=0.1")
    token_loss = -(terms.log_prob * terms.advantages - config.dro_beta / 2 * terms.log_ratio.square())
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    return loss, terms.metrics()
