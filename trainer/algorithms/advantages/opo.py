"""On-policy optimisation with the length-weighted baseline (Hao et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import rollout_scores

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``s - sum(len s) / sum(len)`` over the group, len = model tokens of the rollout. Singleton: 0.

    Arguments and results: `AdvantageFn`. Returns equal the advantages.
    """
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    advantages = rollouts.to_tokens(rollouts.scores.centred(weight=rollouts.length))
    return advantages, advantages
