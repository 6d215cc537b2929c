"""Clip-Cov: tokens of high covariance lose their gradient ("The entropy mechanism", Cui et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentgym.trainer.algorithms.aggregation import Totals
from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode
from agentgym.trainer.algorithms.losses.terms import Terms, by_covariance, clip_ratio, covariances, marked, share_of


def clip_cov(
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
    """PPO's clipped loss, with a few tokens of high covariance of advantage and log-prob taken out at random.

    Candidates have a covariance ``(A - mean A)(lp - mean lp)`` between ``clip_cov_low`` and ``clip_cov_high`` and are
    not clipped already; ``clip_cov_ratio`` of all model tokens (at least one, none for a ratio of 0) is drawn among
    them with ``config.seed``. Means and draw are over this call, so unlike most losses this one depends on the split
    into micro-batches.

    Aggregated by ``token-mean`` by default. Arguments and results: `PolicyLossFn`. Metrics: clip_fraction (tokens taken
    out) and the common ones.
    """
    terms = Terms.of(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    plain = -terms.advantages * terms.ratio
    clipped = -terms.advantages * clip_ratio(terms.ratio, config)
    covariance = covariances(terms)
    candidate = (
        terms.mask & ~(clipped > plain) & (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)
    )
    position = by_covariance(terms, covariance, candidate)
    draw = torch.randperm(len(position), generator=torch.Generator().manual_seed(config.seed))
    number = share_of(terms.mask, config.clip_cov_ratio)
    removed = marked(position[draw[:number].to(position.device)], terms.mask)
    token_loss = torch.maximum(plain, clipped).masked_fill(removed, 0.0)
    loss = terms.aggregate(token_loss, loss_agg_mode or "token-mean", config, loss_mask=loss_mask, totals=totals)
    return loss, terms.metrics(clip_fraction=removed)
