from __future__ import annotations

import math

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.rewards.overlong import overlong_penalty
from agentgym.trainer.algorithms import (
    AlgorithmConfig,
    Totals,
    get_advantage,
    get_policy_loss,
    kl_in_reward,
    mask_truncated,
    place_rewards,
    place_turn_rewards,
)

T = torch.tensor


@pytest.mark.parametrize(("mask", "position"), [([1, 0, 0], 0), ([1, 1, 0], 1), ([1, 0, 1], 2), ([0, 1, 0], 1)])
def test_reward_stands_on_the_last_model_token(mask: list[int], position: int) -> None:  # C9
    rewards, valid = place_rewards([2.0], T([mask]))
    assert rewards.nonzero().tolist() == [[0, position]]
    assert float(rewards.sum()) == 2.0
    assert valid.tolist() == [True]


def test_an_empty_response_takes_no_reward_and_does_not_move_its_group() -> None:  # C10
    mask = T([[0, 0, 0], [1, 1, 0]])
    rewards, valid = place_rewards([10.0, 0.0], mask)
    assert rewards.abs().sum() == 0.0
    assert valid.tolist() == [False, True]
    advantages, _ = get_advantage("grpo")(rewards, mask, ["g", "g"], valid=valid, config=AlgorithmConfig())
    assert advantages.tolist() == torch.zeros(2, 3).tolist()


def test_rows_without_a_score_are_not_valid() -> None:  # C6
    rewards, valid = place_rewards([1.0, None, math.nan, math.inf], torch.ones(4, 2))
    assert rewards.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert int((~valid).sum()) == 3


def test_wrong_number_of_scores_is_an_error() -> None:
    with pytest.raises(ConfigError, match="3 scores for 2 rows"):
        place_rewards([1.0, 2.0, 3.0], torch.ones(2, 2))


def test_turn_rewards_stand_on_the_last_model_token_of_their_turn() -> None:
    mask = T([[1, 1, 0, 1, 0], [0, 0, 0, 1, 1]])
    turns = T([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]])
    rewards = place_turn_rewards([[0.25, 0.5], [9.0, 0.75]], turns, mask)
    assert rewards.tolist() == [[0.0, 0.25, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.75]]


def test_masking_truncated_rollouts_clears_every_mask_but_keeps_the_baseline() -> None:  # B8
    mask = T([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    rewards, valid = place_rewards([1.0, 0.0], mask)
    advantages, _ = get_advantage("grpo")(
        rewards, mask, ["g", "g"], valid=valid, config=AlgorithmConfig(norm_by_std=False)
    )
    assert advantages[0, 0] == 0.5  # the truncated rollout's 0 is in the baseline

    response_mask, loss_mask = mask_truncated(T([False, True]), mask, mask)
    assert response_mask.sum(-1).tolist() == [4, 0]
    assert loss_mask.sum(-1).tolist() == [4, 0]
    assert Totals.of(loss_mask) == Totals(tokens=4, rows=1)

    log_prob = torch.full((2, 6), -1.0, requires_grad=True)
    loss, metrics = get_policy_loss("vanilla")(
        T([[-1.0] * 6, [-2.0] * 6]), log_prob, advantages, response_mask, "token-mean", AlgorithmConfig()
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient[1].abs().max() == 0.0
    assert float(metrics["approx_kl"]) == 0.0
    _, kl = kl_in_reward(rewards, log_prob, T([[-1.0] * 6, [-9.0] * 6]), response_mask, 0.1, "k1")
    assert kl == 0.0


def test_overlong_penalty_counts_model_tokens() -> None:  # C18
    model_tokens = sum([1] * 3 + [0] * 4 + [1] * 6)
    assert model_tokens == 9
    assert overlong_penalty(model_tokens, max_length=10, buffer=4) == -0.75


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (6, 0.0), (7, -0.5), (10, -2.0), (12, -3.0)])
def test_overlong_penalty_is_linear_in_the_buffer(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, max_length=10, buffer=4, factor=2.0) == expected


def test_overlong_penalty_refuses_an_empty_buffer() -> None:
    with pytest.raises(ConfigError, match="buffer is 0"):
        overlong_penalty(9, max_length=10, buffer=0)
