"""The registries of advantage estimators and policy losses. Importable without torch.

A name stands for ``"module:function"`` until it is used: listing names and checking a configuration import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from agentgym import plugins
from agentgym.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from agentgym.trainer.algorithms.aggregation import Totals
    from agentgym.trainer.algorithms.config import AlgorithmConfig, LossAggMode

    Labels: TypeAlias = Sequence[Hashable] | np.ndarray[Any, Any] | Tensor
    """One hashable label per row."""
    Metrics: TypeAlias = Mapping[str, float | Tensor]


class AdvantageFn(Protocol):
    """What `register_advantage` takes.

    An estimator names the keywords that it reads and swallows the rest with ``**_``.
    """

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Labels,
        *,
        values: Tensor | None = None,
        reward_baselines: Tensor | None = None,
        valid: Tensor | None = None,
        rollout: Labels | None = None,
        turn_index: Tensor | None = None,
        config: AlgorithmConfig,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns.

        Args:
            token_level_rewards: [B, T], read where the mask is 1 only.
            response_mask: [B, T], 1 (or True) on the model's own tokens.
            index: [B], group of each row; rows with equal labels answered the same prompt.
            values: [B, T], the critic's, for gae.
            reward_baselines: [B], scores of the greedy rollouts, for remax.
            valid: [B] bool, False for failed or rejected rows; None: all valid. A row without a mask-1 token or with
                a reward that is not finite counts as not valid too.
            rollout: [B], rows with equal labels in one group are segments of one rollout, which counts once in the
                baseline; its score is the mean over its segments (each segment carries the rollout's reward).
                None: each row is a rollout.
            turn_index: [B, T] int, turn of each token, for turn_level.
            config: the algorithm's settings.

        Returns:
            advantages, returns: [B, T] in float32 (float64 for float64 rewards), no gradient, zero outside the mask
            and on rows that are not valid.
        """


class PolicyLossFn(Protocol):
    """What `register_policy_loss` takes. ``extra`` holds the batch fields named in ``config.extra_fields``."""

    def __call__(
        self,
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
        **extra: Any,
    ) -> tuple[Tensor, Metrics]:
        """The loss of one micro-batch, and its metrics.

        Args:
            old_log_prob: [B, T], of the behaviour policy.
            log_prob: [B, T], of the current policy; the gradient flows into it.
            advantages: [B, T].
            response_mask: [B, T], the tokens that are trained.
            loss_agg_mode: see `aggregate_loss`; None: the mode that the loss was published with.
            config: the algorithm's settings.
            rollout_is_weights: [B, T], factors of the token losses; None: 1.
            loss_mask: [B, T], the tokens that the denominators count; None: the response mask.
            totals: counts of the whole mini-batch over all ranks and micro-batches, see `aggregate_loss`.

        Returns:
            loss: scalar. With ``totals``, a share: sum it over micro-batches and ranks.
            metrics: 0-d tensors without gradient, each a mean over the mask-1 tokens of this call; combine them over
            micro-batches with `MetricMeans`.
        """


ADVANTAGES: Registry[AdvantageFn] = Registry("advantage estimator", before_lookup=plugins.scan)
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", before_lookup=plugins.scan)

for _name in (
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "turn_level",
):
    ADVANTAGES.register(_name, f"agentgym.trainer.algorithms.advantages.{_name}:{_name}")
for _name in ("cispo", "clip_cov", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla"):
    POLICY_LOSSES.register(_name, f"agentgym.trainer.algorithms.losses.{_name}:{_name}")

F = TypeVar("F", bound=Callable[..., Any])


def register_advantage(name: str, *, override: bool = False) -> Callable[[F], F]:
    """Decorator: make an `AdvantageFn` available as ``algo.advantage=name``."""

    def decorate(function: F) -> F:
        ADVANTAGES.register(name, function, override=override)
        return function

    return decorate


def get_advantage(name: str) -> AdvantageFn:
    """The estimator of that name. Raises `UnknownName` with the nearest one."""
    return ADVANTAGES.get(name)


def register_policy_loss(name: str, *, override: bool = False) -> Callable[[F], F]:
    """Decorator: make a `PolicyLossFn` available as ``algo.policy_loss=name``."""

    def decorate(function: F) -> F:
        POLICY_LOSSES.register(name, function, override=override)
        return function

    return decorate


def get_policy_loss(name: str) -> PolicyLossFn:
    """The policy loss of that name. Raises `UnknownName` with the nearest one."""
    return POLICY_LOSSES.get(name)


def list_advantages() -> list[str]:
    """Names of all registered advantage estimators."""
    return ADVANTAGES.names()


def list_policy_losses() -> list[str]:
    """Names of all registered policy losses."""
    return POLICY_LOSSES.names()
