"""REINFORCE++ with a group baseline (Hu 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import rollout_scores
from agentgym.trainer.algorithms.masked import masked_whiten, select

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``s - mean`` of the group on every model token, whitened over the batch's tokens if ``config.whiten``.

    Singletons and groups of equal scores count as 0 in the whitening and get 0: whitening shifts by the batch's mean,
    which would otherwise hand them a signal that their group does not have.

    Arguments and results: `AdvantageFn`. Returns equal the advantages.
    """
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    advantages = rollouts.to_tokens(rollouts.scores.centred())
    if config.whiten:
        informative = rollouts.to_tokens(rollouts.scores.informative)
        advantages = select(masked_whiten(advantages, rollouts.mask), informative)
    return advantages, advantages
