"""REINFORCE leave-one-out (Ahmadian et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import rollout_scores

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``n/(n-1) * (s - mean)``: the score minus the mean of the group's others. Singleton: 0.

    Arguments and results: `AdvantageFn`. Returns equal the advantages.
    """
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    n = rollouts.scores.count
    advantages = rollouts.to_tokens(rollouts.scores.centred() * n / (n - 1).clamp(min=1))
    return advantages, advantages
