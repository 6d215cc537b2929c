from __future__ import annotations

import math

import pytest
import torch

from agentgym.trainer.algorithms import masked_mean, masked_var, masked_whiten

T = torch.tensor


def test_mean_and_variance_are_of_the_masked_positions_only() -> None:
    values, mask = T([[1.0, 99.0, 3.0], [5.0, 99.0, 99.0]]), T([[1, 0, 1], [1, 0, 0]])
    assert float(masked_mean(values, mask)) == 3.0
    assert float(masked_var(values, mask)) == 4.0


def test_whitening_has_mean_0_and_variance_1_and_zeros_outside() -> None:
    values, mask = T([[1.0, 99.0, 3.0], [5.0, 99.0, 99.0]]), T([[1, 0, 1], [1, 0, 0]])
    torch.testing.assert_close(masked_whiten(values, mask), T([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("mask", [[0, 0], [0, 1]])
def test_fewer_than_two_positions_whiten_to_zero(mask: list[int]) -> None:
    assert masked_whiten(T([3.0, 4.0]), T(mask)).tolist() == [0.0, 0.0]
    assert float(masked_var(T([3.0, 4.0]), T(mask))) == 0.0


def test_mean_of_nothing_is_zero() -> None:
    assert float(masked_mean(T([3.0]), T([0]))) == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
def test_garbage_outside_the_mask_does_no_harm(garbage: float) -> None:
    values, mask = T([1.0, garbage, 3.0]), T([1, 0, 1])
    assert float(masked_mean(values, mask)) == 2.0
    assert float(masked_var(values, mask)) == 2.0
    assert masked_whiten(values, mask).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_masked_value_that_is_not_finite_is_left_out(bad: float) -> None:
    values, mask = T([1.0, bad, 3.0]), T([1, 1, 1])
    assert float(masked_mean(values, mask)) == 2.0
    assert masked_whiten(values, mask).tolist()[1] == 0.0


def test_equal_values_whiten_to_zero_not_to_blown_up_rounding_noise() -> None:
    assert masked_whiten(torch.full((7, 9), 0.9), torch.ones(7, 9)).abs().max() == 0.0
