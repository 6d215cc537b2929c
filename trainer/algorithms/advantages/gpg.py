"""Group policy gradient (Chu et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import rollout_scores

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``alpha (s - mean)`` with alpha = rollouts / max(1, rollouts with a score other than 0). Singleton: 0.

    alpha counts the whole batch, rollouts that take part only. Arguments and results: `AdvantageFn`. Returns equal the
    advantages.
    """
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    score = rollouts.scores.score
    alpha = len(score) / max(1, int(torch.count_nonzero(score)))
    advantages = rollouts.to_tokens(alpha * rollouts.scores.centred())
    return advantages, advantages
