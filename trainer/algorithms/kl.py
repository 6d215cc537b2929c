"""KL penalties against a reference policy (estimators after J. Schulman, "Approximating KL divergence")."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from agentgym.errors import ConfigError, did_you_mean
from agentgym.trainer.algorithms.config import KLKind
from agentgym.trainer.algorithms.masked import masked_mean, select, working

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0


def log_ratio(log_prob: Tensor, other: Tensor) -> Tensor:
    """``log_prob - other`` in float32 or better; 0 (without gradient) where a side is not finite."""
    log_prob, other = working(log_prob), working(other)
    finite = log_prob.isfinite() & other.isfinite()
    return select(log_prob, finite) - select(other, finite)


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens.

    With ``d = ref - lp``: ``k1`` is ``-d``, ``abs`` is ``|d|``, ``k2`` is ``d^2 / 2``, ``k3`` is ``exp(d) - d - 1``
    with d clamped to +-20 and the result to 10. A ``+`` keeps the value and takes the gradient of k2, the unbiased
    one (straight-through).

    Args:
        log_prob: [...], current policy; the gradient flows into it.
        ref_log_prob: [...], reference policy.
        kind: estimator.

    Returns:
        [...] finite; 0 where an input is not. k3 is never negative, k1 may be.

    Raises:
        ConfigError: unknown kind.
    """
    if kind not in get_args(KLKind):
        known = get_args(KLKind)
        raise ConfigError(f"unknown KL estimator {kind!r}.{did_you_mean(str(kind), known)} Known: {', '.join(known)}")
    difference = log_ratio(log_prob, ref_log_prob)
    value = _estimate(difference, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    k2 = _estimate(difference, "k2")
    return k2 - k2.detach() + value.detach()


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return difference.square() / 2
    d = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1: exp(d) - d - 1 in float32 loses all digits near 0 and comes out negative.
    return (torch.expm1(d) - d).clamp(0.0, K3_BOUND)


@torch.no_grad()
def kl_in_reward(
    token_level_rewards: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    coef: float,
    kind: KLKind,
) -> tuple[Tensor, float]:
    """``r - coef * kl`` on the model's tokens.

    Args:
        token_level_rewards, log_prob, ref_log_prob, response_mask: [B, T].
        coef: beta, e.g. ``AdaptiveKL.coef``.
        kind: see `kl_penalty`.

    Returns:
        rewards: [B, T], zero outside the mask.
        kl: mean over rows of their token means, for `AdaptiveKL.update`.
    """
    mask = response_mask.bool()
    kl = select(kl_penalty(log_prob, ref_log_prob, kind), mask)
    rewards = select(working(token_level_rewards) - coef * kl, mask)
    row_kl = kl.sum(-1) / mask.sum(-1).clamp(min=1)
    return rewards, float(masked_mean(row_kl, mask.any(-1)))


class AdaptiveKL:
    """Weight of the KL penalty in the reward, fixed or steered towards a target KL (Ziegler et al. 2019).

    Example:
        ``AdaptiveKL(0.1, target=0.05, horizon=1000)``; a batch of 100 rollouts with KL 0.1 gives ``coef`` 0.102.

    Attributes:
        coef: the present weight; saved with a checkpoint.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 10_000) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rollouts: int) -> None:
        """Adapt to the mean KL of ``rollouts`` rollouts; does nothing without a target."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * rollouts / self.horizon
