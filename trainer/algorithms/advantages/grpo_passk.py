"""GRPO for pass@k: only the best rollout of a group is rewarded (Walder and Karkhanis 2025, as in verl)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.grouping import STD_EPS, rollout_scores

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    rollout: Labels | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Best of the group: ``s_max - s_2nd``, over ``std + 1e-6`` if ``config.norm_by_std``; all others 0. Singleton: 0.

    Two rollouts that share the best score get 0 each. Arguments and results: `AdvantageFn`. Returns equal the
    advantages.
    """
    rollouts = rollout_scores(token_level_rewards, response_mask, index, valid=valid, rollout=rollout)
    margin = rollouts.scores.margin()
    if config.norm_by_std:
        margin = margin / (rollouts.scores.std + STD_EPS)
    advantages = rollouts.to_tokens(margin)
    return advantages, advantages
