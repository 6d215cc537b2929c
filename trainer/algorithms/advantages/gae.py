"""Generalised advantage estimation (Schulman et al. 2016) over the model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms.config import AlgorithmConfig
from agentgym.trainer.algorithms.masked import whiten
from agentgym.trainer.algorithms.scan import pack, suffix_sums

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.registry import Labels


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    values: Tensor | None = None,
    valid: Tensor | None = None,
    config: AlgorithmConfig,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """``A_k = delta_k + gamma lam A_(k+1)`` with ``delta_k = r_k + gamma V_(k+1) - V_k``, k counting model tokens only.

    Observation tokens are skipped: neither their values nor their number matter. After the last model token the value
    is 0. Returns are ``A + V`` before whitening; advantages are whitened over the batch if ``config.whiten``.

    Arguments and results: `AdvantageFn`. Raises `ConfigError` without ``values``.
    """
    if values is None:
        raise ConfigError("advantage 'gae' needs the critic's values; configure a critic, or choose e.g. 'grpo'")
    packed, (reward, value) = pack(response_mask, valid, token_level_rewards, values)
    delta = reward + config.gamma * packed.following(value) - value
    advantages = packed.line(suffix_sums(packed.rows(delta), config.gamma * config.lam))
    returns = packed.spread(advantages + value)
    return packed.spread(whiten(advantages) if config.whiten else advantages), returns
