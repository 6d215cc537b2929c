"""GSPO: the importance ratio of the whole sequence (Zheng et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, clip_ratio, row_mean

MAX_LOG_RATIO = 10.0


def gspo(
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
    """``max(-A s, -A clip(s))`` with s = exp of the sequence's mean log-ratio, straight-through to the tokens.

    The value of s is the same on all tokens of a row; its gradient on a token is that of the token's log-prob. s is at
    most e^10. Aggregated by ``seq-mean-token-mean`` by default. A row must not be split over calls.

    Arguments and results: `PolicyLossFn`. Metrics: clip_fraction and the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    mean = row_mean(terms.log_ratio, terms.mask)[:, None].detach()
    ratio = (terms.log_prob - terms.log_prob.detach() + mean).clamp(max=MAX_LOG_RATIO).exp()
    plain = -terms.advantages * ratio
    clipped = -terms.advantages * clip_ratio(ratio, config)
    token_loss = torch.maximum(plain, clipped)
    loss = terms.aggregate(
        token_loss, loss_agg_mode or "seq-mean-token-mean", config, loss_mask=loss_mask, totals=totals
    )
    return loss, terms.metrics(clip_fraction=clipped > plain)
