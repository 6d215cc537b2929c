"""Advantages, policy losses, KL penalties and their helpers: pure functions of tensors, one registry per kind.

Importing this package does not import torch; the first use of a name below does, if the name needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentgym.trainer.algorithms.aggregation import Totals, aggregate_loss
    from agentgym.trainer.algorithms.config import AlgorithmConfig
    from agentgym.trainer.algorithms.correction import Corrected, rollout_correction
    from agentgym.trainer.algorithms.filtering import FilterExhausted, GroupCollector, has_spread
    from agentgym.trainer.algorithms.kl import AdaptiveKL, kl_in_reward, kl_penalty
    from agentgym.trainer.algorithms.log_probs import sampled_log_probs
    from agentgym.trainer.algorithms.masked import masked_mean, masked_var, masked_whiten
    from agentgym.trainer.algorithms.metrics import MetricMeans
    from agentgym.trainer.algorithms.registry import (
        get_advantage,
        get_policy_loss,
        list_advantages,
        list_policy_losses,
        register_advantage,
        register_policy_loss,
    )
    from agentgym.trainer.algorithms.rewards import mask_truncated, place_rewards, place_turn_rewards
    from agentgym.trainer.algorithms.value import explained_variance, value_loss

_MODULES = {
    "AdaptiveKL": "kl",
    "AlgorithmConfig": "config",
    "Corrected": "correction",
    "FilterExhausted": "filtering",
    "GroupCollector": "filtering",
    "MetricMeans": "metrics",
    "Totals": "aggregation",
    "aggregate_loss": "aggregation",
    "explained_variance": "value",
    "get_advantage": "registry",
    "get_policy_loss": "registry",
    "has_spread": "filtering",
    "kl_in_reward": "kl",
    "kl_penalty": "kl",
    "list_advantages": "registry",
    "list_policy_losses": "registry",
    "mask_truncated": "rewards",
    "masked_mean": "masked",
    "masked_var": "masked",
    "masked_whiten": "masked",
    "place_rewards": "rewards",
    "place_turn_rewards": "rewards",
    "register_advantage": "registry",
    "register_policy_loss": "registry",
    "rollout_correction": "correction",
    "sampled_log_probs": "log_probs",
    "value_loss": "value",
}
__all__ = [
    "AdaptiveKL",
    "AlgorithmConfig",
    "Corrected",
    "FilterExhausted",
    "GroupCollector",
    "MetricMeans",
    "Totals",
    "aggregate_loss",
    "explained_variance",
    "get_advantage",
    "get_policy_loss",
    "has_spread",
    "kl_in_reward",
    "kl_penalty",
    "list_advantages",
    "list_policy_losses",
    "mask_truncated",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "place_rewards",
    "place_turn_rewards",
    "register_advantage",
    "register_policy_loss",
    "rollout_correction",
    "sampled_log_probs",
    "value_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
