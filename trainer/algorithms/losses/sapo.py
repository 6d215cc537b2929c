"""SAPO: a soft gate in place of the clip (Gao et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms


def sapo(
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
    """``-A sigmoid(tau (ratio - 1)) 4/tau``; tau is 1.0 where A > 0 and 1.05 elsewhere (configurable).

    Aggregated by ``seq-mean-token-mean`` by default. Arguments and results: `PolicyLossFn`. Metrics: the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    positive = terms.advantages > 0
    tau = torch.where(positive, config.sapo_tau_positive, config.sapo_tau_negative).to(terms.ratio.dtype)
    token_loss = -terms.advantages * torch.sigmoid(tau * (terms.ratio - 1.0)) * 4.0 / tau
    loss = terms.aggregate(
        token_loss, loss_agg_mode or "seq-mean-token-mean", config, loss_mask=loss_mask, totals=totals
    )
    return loss, terms.metrics()
