from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import AlgorithmConfig, get_advantage, list_advantages, masked_whiten, place_rewards

T = torch.tensor
PLAIN = AlgorithmConfig(norm_by_std=False, whiten=False)
GROUPED = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "turn_level")


def group(
    name: str, scores: Sequence[float | None], *, tokens: int = 2, config: AlgorithmConfig | None = None, **more: Any
) -> list[float]:
    """Advantages of rows with ``tokens`` model tokens each, one number per row; all of a row's tokens must agree."""
    mask = torch.ones(len(scores), tokens)
    rewards, valid = place_rewards(scores, mask)
    more = {"index": ["g"] * len(scores), "valid": valid, "turn_index": torch.zeros_like(mask).long(), **more}
    index = more.pop("index")
    advantages, returns = get_advantage(name)(rewards, mask, index, config=config or AlgorithmConfig(), **more)
    assert bool(advantages.isfinite().all())
    assert bool(returns.isfinite().all())
    assert torch.equal(advantages, advantages[:, :1].expand_as(advantages))
    return [float(a) for a in advantages[:, 0]]


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_give_exactly_zero(name: str) -> None:  # C1
    rows = [(cents / 100, (cents, n)) for cents in range(1, 100) for n in range(2, 17) for _ in range(n)]
    scores, index = zip(*rows, strict=True)
    assert set(group(name, scores, tokens=1, index=index)) == {0.0}


@pytest.mark.parametrize("name", GROUPED)
def test_rewards_equal_up_to_rounding_give_exactly_zero(name: str) -> None:  # C1
    almost = float(np.nextafter(np.float32(0.9), np.float32(1.0)))
    assert group(name, [0.9, almost, 0.9, 0.9]) == [0.0] * 4


def test_small_but_real_differences_count() -> None:
    assert group("grpo", [0.9, 0.9001])[1] == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_gets_zero(name: str) -> None:  # C3
    assert group(name, [1.0]) == [0.0]
    assert group(name, [1.0, 0.0, 0.5], index=["a", "a", "b"])[2] == 0.0


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("grpo", AlgorithmConfig(), [1.5, -0.5, -0.5, -0.5]),
        ("grpo", PLAIN, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", AlgorithmConfig(), [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("opo", AlgorithmConfig(), [0.75, -0.25, -0.25, -0.25]),
        ("gpg", AlgorithmConfig(), [3.0, -1.0, -1.0, -1.0]),
        ("grpo_passk", AlgorithmConfig(), [2.0, 0.0, 0.0, 0.0]),
        ("grpo_passk", PLAIN, [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", PLAIN, [0.75, -0.25, -0.25, -0.25]),
        ("turn_level", AlgorithmConfig(), [1.5, -0.5, -0.5, -0.5]),
        ("turn_level", PLAIN, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(name: str, config: AlgorithmConfig, expected: list[float]) -> None:  # C3
    assert group(name, [1.0, 0.0, 0.0, 0.0], config=config) == pytest.approx(expected, rel=1e-5)


def test_grouping_is_by_the_given_key_in_any_row_order() -> None:  # C4
    r = 3**0.5 / 2
    assert group("grpo", [1.0, 0.0, 0.0, 1.0]) == pytest.approx([r, -r, -r, r], rel=1e-5)
    assert group("grpo", [0.0, 1.0, 0.0, 1.0], index=["a", "b", "a", "b"]) == [0.0] * 4
    shuffled = group("grpo", [1.0, 5.0, 0.0, 5.0, 0.0, 1.0], index=[1, 2, 1, 2, 1, 1])
    assert shuffled == pytest.approx([r, 0.0, -r, 0.0, -r, r], rel=1e-5)


@pytest.mark.parametrize(
    "index",
    [["x", "x", "y", "y"], [7, 7, 9, 9], np.array([0, 0, 1, 1]), T([3, 3, 4, 4]), ("p", "p", ("q", 1), ("q", 1))],
)
def test_any_hashable_labels_serve_as_groups(index: Any) -> None:
    assert group("grpo", [1.0, 0.0, 2.0, 0.0], config=PLAIN, index=index) == [0.5, -0.5, 1.0, -1.0]


def test_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ConfigError, match="index has 1 labels for 2 rows"):
        group("grpo", [1.0, 0.0], index=["g"])


def test_a_rollout_in_segments_counts_once_in_the_baseline() -> None:  # C5
    scores = [1.0, 1.0, 0.0]
    assert group("grpo", scores, rollout=["r1", "r1", "r2"], config=PLAIN) == [0.5, 0.5, -0.5]
    assert group("grpo", scores, config=PLAIN) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert group("rloo", scores, rollout=[0, 0, 1]) == [1.0, 1.0, -1.0]
    assert group("gpg", scores, rollout=[0, 0, 1]) == [1.0, 1.0, -1.0]
    assert group("turn_level", scores, rollout=[0, 0, 1], config=PLAIN) == [0.5, 0.5, -0.5]


def test_lengths_of_segments_add_up() -> None:
    # Rollout 1 has 2 + 2 model tokens, rollout 2 has 2: the baseline is 4/6.
    assert group("opo", [1.0, 1.0, 0.0], rollout=[1, 1, 2]) == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_rollout_labels_may_repeat_in_another_group() -> None:
    advantages = group("grpo", [1.0, 0.0, 3.0, 1.0], index=["a", "a", "b", "b"], rollout=[0, 1, 0, 1], config=PLAIN)
    assert advantages == [0.5, -0.5, 1.0, -1.0]


def test_unscorable_rows_take_no_part() -> None:  # C6
    expected = [0.5773503, -1.1547005, 0.0, 0.5773503]
    assert group("grpo", [1.0, 0.0, None, 1.0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", list_advantages())
def test_all_rows_unscorable_give_zeros(name: str) -> None:  # C6
    values, baselines = torch.ones(3, 2), torch.ones(3)
    assert group(name, [None, None, None], values=values, reward_baselines=baselines) == [0.0] * 3


@pytest.mark.parametrize("name", list_advantages())
def test_a_nan_reward_on_a_model_token_takes_the_row_out_and_no_other(name: str) -> None:  # C6
    rewards = T([[0.0, 1.0], [0.0, 0.0], [math.nan, 0.0], [0.0, 1.0]])
    more: dict[str, Any] = {
        "values": T([[0.1, 0.4], [0.2, 0.3], [0.5, 0.5], [0.3, 0.3]]),
        "reward_baselines": T([0.2, 0.3, 0.4, 0.5]),
        "turn_index": torch.zeros(4, 2).long(),
        "config": AlgorithmConfig(gamma=0.9),
    }
    advantages, returns = get_advantage(name)(rewards, torch.ones(4, 2), ["g"] * 4, **more)
    assert advantages[2].tolist() == [0.0, 0.0]
    assert returns[2].tolist() == [0.0, 0.0]
    others = [0, 1, 3]
    for key in ("values", "reward_baselines", "turn_index"):
        more[key] = more[key][others]
    without, _ = get_advantage(name)(rewards[others], torch.ones(3, 2), ["g"] * 3, **more)
    torch.testing.assert_close(advantages[others], without)


def test_reward_to_go_decays_once_per_model_token() -> None:  # C11
    rewards, mask = T([[0.0, 0.0, 0.0, 0.0, 1.0]]), T([[1, 0, 0, 1, 1]])
    config = AlgorithmConfig(gamma=0.5, whiten=False)
    advantages, returns = get_advantage("reinforce_plus_plus")(rewards, mask, ["g"], config=config)
    assert returns.tolist() == [[0.25, 0.0, 0.0, 0.5, 1.0]]
    assert torch.equal(advantages, returns)
    whitened, unwhitened = get_advantage("reinforce_plus_plus")(rewards, mask, ["g"], config=AlgorithmConfig(gamma=0.5))
    assert torch.equal(unwhitened, returns)
    torch.testing.assert_close(whitened, masked_whiten(returns, mask))


@pytest.mark.parametrize(
    ("gamma", "lam", "rewards", "values", "mask", "expected"),
    [
        (1.0, 1.0, [0.0, 0.0, 1.0], [0.2, 9.0, 0.4], [1, 0, 1], [0.8, 0.0, 0.6]),
        (0.9, 0.8, [0.0, 0.0, 1.0], [0.2, 9.0, 0.4], [1, 0, 1], [0.592, 0.0, 0.6]),
        (0.9, 0.8, [0.0, 1.0, 0.0], [0.2, 0.4, 9.0], [1, 1, 0], [0.592, 0.6, 0.0]),
    ],
)
def test_gae_skips_observation_tokens(  # C12
    gamma: float, lam: float, rewards: list[float], values: list[float], mask: list[int], expected: list[float]
) -> None:
    config = AlgorithmConfig(gamma=gamma, lam=lam, whiten=False)
    advantages, returns = get_advantage("gae")(T([rewards]), T([mask]), ["g"], values=T([values]), config=config)
    torch.testing.assert_close(advantages, T([expected]))
    torch.testing.assert_close(returns, T([[(a + v) * m for a, v, m in zip(expected, values, mask, strict=True)]]))


def test_remax_subtracts_the_greedy_score_and_leaves_failed_greedy_rows_out() -> None:
    advantages, returns = get_advantage("remax")(
        T([[0.5, 0.0, 1.0], [0.0, 0.0, 1.0]]),
        T([[1, 0, 1], [1, 1, 1]]),
        ["a", "b"],
        reward_baselines=T([0.25, math.nan]),
        config=AlgorithmConfig(gamma=0.5),
    )
    assert advantages.tolist() == [[1.25, 0.0, 0.75], [0.0, 0.0, 0.0]]
    assert returns.tolist() == [[1.5, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_two_best_rollouts_share_nothing_at_pass_at_k() -> None:
    assert group("grpo_passk", [1.0, 1.0, 0.0]) == [0.0, 0.0, 0.0]
    assert group("grpo_passk", [1.0, 0.75, 0.0], config=PLAIN) == [0.25, 0.0, 0.0]


def test_gpg_scales_by_the_share_of_scores_that_are_not_zero() -> None:
    # 6 rollouts take part, 2 of them have a score: alpha = 3.
    advantages = group("gpg", [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, None], index=["a", "a", "b", "b", "b", "b", "b"])
    assert advantages == pytest.approx([1.5, -1.5, 2.25, -0.75, -0.75, -0.75, 0.0])


def test_a_baseline_group_without_signal_stays_at_zero_through_the_whitening() -> None:
    scores, index = [1.0, 0.0, 0.5, 0.7, 0.7], ["a", "a", "alone", "b", "b"]
    mask = T([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards, _ = place_rewards(scores, mask)
    advantages, _ = get_advantage("reinforce_plus_plus_baseline")(rewards, mask, index, config=AlgorithmConfig())
    centred = T([0.5, -0.5, 0.0, 0.0, 0.0])[:, None] * mask
    expected = masked_whiten(centred, mask)
    torch.testing.assert_close(advantages[:2], expected[:2])
    assert advantages[2:].abs().max() == 0.0


def turns(rewards: Tensor, *, mask: Tensor, turn_index: Tensor, config: AlgorithmConfig = PLAIN) -> Tensor:
    index = ["g"] * len(mask)
    advantages, _ = get_advantage("turn_level")(rewards, mask, index, turn_index=turn_index, config=config)
    return advantages


def test_turns_are_compared_with_the_same_turn_of_other_rollouts() -> None:
    mask = T([[1, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    turn_index = T([[0, 0, 1, 1, 2], [0, 0, 0, 1, 1]])
    # Turn rewards 0.5, 0, 1 and 0, 0.25: rewards-to-go 1.5, 1, 1 and 0.25, 0.25; the third turn has no partner.
    rewards = T([[0.5, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.25, 0.0]])
    expected = T([[0.625, 0.0, 0.375, 0.375, 0.0], [-0.625, -0.625, 0.0, -0.375, 0.0]])
    torch.testing.assert_close(turns(rewards, mask=mask, turn_index=turn_index), expected)


def test_turn_numbers_outside_the_mask_do_not_matter() -> None:
    mask, rewards = T([[1, 0, 1], [1, 0, 1]]), T([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]])
    one = turns(rewards, mask=mask, turn_index=T([[0, 0, 1], [0, 1, 1]]))
    other = turns(rewards, mask=mask, turn_index=T([[0, -7, 1], [0, 99, 1]]))
    assert torch.equal(one, other)
    assert one.tolist() == [[0.25, 0.0, 0.5], [-0.25, 0.0, -0.5]]


@pytest.mark.parametrize(
    ("name", "needs"), [("gae", "values"), ("remax", "reward_baselines"), ("turn_level", "turn_index")]
)
def test_missing_inputs_are_named(name: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=needs):
        get_advantage(name)(torch.ones(1, 1), torch.ones(1, 1), ["g"], config=AlgorithmConfig())


@pytest.mark.parametrize("name", list_advantages())
@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (2, 0)])
def test_batches_without_tokens_give_empty_results(name: str, rows: int, tokens: int) -> None:
    empty = torch.zeros(rows, tokens)
    advantages, returns = get_advantage(name)(
        empty,
        empty,
        ["g"] * rows,
        values=empty,
        reward_baselines=torch.zeros(rows),
        turn_index=empty.long(),
        config=AlgorithmConfig(gamma=0.9),
    )
    assert advantages.shape == returns.shape == (rows, tokens)
