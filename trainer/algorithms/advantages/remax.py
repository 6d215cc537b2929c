"""ReMax: the greedy rollout's score as baseline (Li et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.scan import pack, suffix_sums

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def remax(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    reward_baselines: Tensor | None = None,
    valid: Tensor | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Undiscounted reward-to-go minus the score of the greedy rollout of the same prompt.

    Arguments and results: `AdvantageFn`. Returns are the rewards-to-go. A row whose baseline is not finite (the greedy
    rollout failed) takes no part. Raises `ConfigError` without ``reward_baselines``.
    """
    if reward_baselines is None:
        raise ConfigError("advantage 'remax' needs reward_baselines [B], the scores of greedy rollouts; got None")
    baseline = reward_baselines.to(token_level_rewards.device)
    usable = baseline.isfinite() if valid is None else baseline.isfinite() & valid.bool().to(baseline.device)
    packed, (reward,) = pack(response_mask, usable, token_level_rewards)
    returns = suffix_sums(packed.rows(reward), 1.0)
    advantages = returns - baseline.nan_to_num(posinf=0.0, neginf=0.0).to(returns.dtype)[:, None]
    return packed.spread(packed.line(advantages)), packed.spread(packed.line(returns))
