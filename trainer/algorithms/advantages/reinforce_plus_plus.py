"""REINFORCE++ (Hu 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.masked import whiten
from agentgym.trainer.algorithms.scan import pack, suffix_sums

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    valid: Tensor | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Discounted reward-to-go, one decay per model token, whitened over the batch if ``config.whiten``.

    Arguments and results: `AdvantageFn`. Returns are the rewards-to-go before whitening.
    """
    packed, (reward,) = pack(response_mask, valid, token_level_rewards)
    returns = packed.line(suffix_sums(packed.rows(reward), config.gamma))
    return packed.spread(whiten(returns) if config.whiten else returns), packed.spread(returns)
