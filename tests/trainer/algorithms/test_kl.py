from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import AdaptiveKL, kl_in_reward, kl_penalty
from agentgym.trainer.algorithms.config import KLKind

T = torch.tensor
KINDS: tuple[KLKind, ...] = get_args(KLKind)
LOG_PROBS = st.floats(-60.0, 0.0, width=32)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_each_estimator_has_its_own_value(kind: KLKind, expected: float) -> None:  # C13
    assert float(kl_penalty(T(-1.0), T(-1.5), kind)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ref", [99.0, -1000.0, math.inf, -math.inf, math.nan])
def test_extreme_differences_stay_finite(kind: KLKind, ref: float) -> None:  # C13
    log_prob = T(-1.0, requires_grad=True)
    value = kl_penalty(log_prob, T(ref), kind)
    (gradient,) = torch.autograd.grad(value, log_prob)
    assert value.isfinite()
    assert gradient.isfinite()


@given(LOG_PROBS, LOG_PROBS)
def test_k3_is_never_negative(log_prob: float, ref: float) -> None:  # C13
    assert float(kl_penalty(T(log_prob), T(ref), "k3")) >= 0.0


def test_k3_is_never_negative_for_tiny_differences() -> None:
    ref = torch.linspace(-1e-3, 1e-3, 2001)
    assert float(kl_penalty(torch.zeros(2001), ref, "k3").min()) >= 0.0


@pytest.mark.parametrize("kind", ["k1+", "abs+", "k2+", "k3+"])
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: KLKind) -> None:
    log_prob, ref = T([-1.0, -2.0], requires_grad=True), T([-1.5, -0.7])
    value = kl_penalty(log_prob, ref, kind)
    torch.testing.assert_close(value, kl_penalty(log_prob, ref, kind[:-1]))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.autograd.grad(value.sum(), log_prob)[0], T([0.5, -1.3]))


def test_unknown_estimator_is_an_error() -> None:  # C13
    with pytest.raises(ConfigError, match=r"'k4'.*Known: k1, abs"):
        kl_penalty(T(0.0), T(0.0), "k4")  # type: ignore[arg-type]


def test_penalty_is_taken_off_the_model_tokens() -> None:
    rewards, kl = kl_in_reward(
        T([[0.0, math.nan, 1.0]]), T([[-1.0, math.nan, -1.0]]), T([[-1.5, 0.0, -2.0]]), T([[1, 0, 1]]), 0.1, "k1"
    )
    torch.testing.assert_close(rewards, T([[-0.05, 0.0, 0.9]]))
    assert kl == pytest.approx(0.75)


def test_mean_kl_counts_each_non_empty_row_once() -> None:
    mask = T([[1, 0], [1, 1], [0, 0]])
    _, kl = kl_in_reward(
        torch.zeros(3, 2), torch.zeros(3, 2), T([[-3.0, 0.0], [-1.0, -1.0], [9.0, 9.0]]), mask, 0.1, "k1"
    )
    assert kl == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.05, 0.1), (0.1, 0.102), (0.0, 0.098), (0.055, 0.101), (math.nan, 0.1), (math.inf, 0.1)]
)
def test_adaptive_weight_moves_towards_the_target(kl: float, expected: float) -> None:
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    controller.update(kl, rollouts=100)
    assert controller.coef == pytest.approx(expected)


def test_fixed_weight_stays() -> None:
    controller = AdaptiveKL(0.1)
    controller.update(10.0, rollouts=100)
    assert controller.coef == 0.1
