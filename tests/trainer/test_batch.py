"""From rollouts to tensors: who has rows, what is masked, where the reward stands."""

from __future__ import annotations

import pytest
import torch
from factories import rollout, segment

from agentgym.errors import ConfigError
from agentgym.trainer.algorithms import AlgorithmConfig, get_advantage
from agentgym.trainer.batch import make_batch, mask_truncated, union
from agentgym.types import RolloutStatus


def test_ids_masks_and_log_probs_are_padded_on_the_right() -> None:
    # B7, B9: padding is told by position, never by id
    batch = make_batch(
        [
            rollout(1.0, segment([5, 6], [7, 8, 2], [1, 1, 1])),
            rollout(0.0, segment([5, 6, 2], [2, 9, 4, 2], [1, 0, 0, 1]), sample=1),
        ]
    )
    assert batch["response_ids"].tolist() == [[7, 8, 2, 0], [2, 9, 4, 2]]
    assert batch["response_mask"].int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 1]]
    assert batch["prompt_ids"].tolist() == [[5, 6, 0], [5, 6, 2]]
    assert batch["prompt_length"].tolist() == [2, 3]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.5, -0.5, 0], [-0.5, 0, 0, -0.5]]
    assert batch["prompt_group"].tolist() == [0, 1]
    assert batch["weight_version"].tolist() == [3, 3]


def test_the_reward_stands_at_the_last_model_token() -> None:
    # C9
    batch = make_batch([rollout(2.0, segment([1], [7, 8, 9, 3], [1, 1, 0, 0]))])
    assert batch["token_level_rewards"].tolist() == [[0, 2.0, 0, 0]]


def test_a_response_without_model_tokens_has_no_row() -> None:
    # C10, B16
    batch = make_batch(
        [rollout(10.0, segment([1], [], [])), rollout(0.0, segment([1], [7, 8, 4], [1, 1, 0]), sample=1)]
    )
    assert batch["rollout"].tolist() == [1]
    advantages, _ = get_advantage("grpo")(
        batch["token_level_rewards"],
        batch["response_mask"],
        batch["group"],
        valid=batch["valid"],
        config=AlgorithmConfig(),
    )
    assert advantages.abs().sum() == 0


def test_failures_have_no_rows_and_unscored_rollouts_are_not_valid() -> None:
    # C6
    played = segment([1], [7], [1])
    batch = make_batch(
        [
            rollout(1.0, played),
            rollout(0.0, played, sample=1),
            rollout(None, played, sample=2, status=RolloutStatus.FAILED_INFRA),
            rollout(None, played, sample=3, status=RolloutStatus.TIMED_OUT),
            rollout(1.0, played, sample=4),
        ]
    )
    assert batch["rollout"].tolist() == [0, 1, 3, 4]
    assert batch["valid"].tolist() == [True, True, False, True]
    advantages, _ = get_advantage("grpo")(
        batch["token_level_rewards"],
        batch["response_mask"],
        batch["group"],
        valid=batch["valid"],
        config=AlgorithmConfig(),
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.5773503, -1.1547005, 0, 0.5773503], abs=1e-5)


def test_segments_of_one_rollout_count_once_in_the_baseline() -> None:
    # C5
    batch = make_batch(
        [
            rollout(1.0, segment([1], [7], [1]), segment([1, 7, 2], [8], [1])),
            rollout(0.0, segment([1], [9], [1]), sample=1),
        ]
    )
    assert batch["rollout"].tolist() == [0, 0, 1]
    advantages, _ = get_advantage("grpo")(
        batch["token_level_rewards"],
        batch["response_mask"],
        batch["group"],
        valid=batch["valid"],
        rollout=batch["rollout"],
        config=AlgorithmConfig(norm_by_std=False),
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.5, 0.5, -0.5])


def test_groups_follow_the_draw_not_the_prompt_text() -> None:
    # C4
    played = segment([1, 2], [7], [1])
    batch = make_batch([rollout(0.0, played, group="a"), rollout(1.0, played, group="b")])
    assert batch["group"].tolist() == [0, 1]
    assert batch["prompt_group"].tolist() == [0, 0]


def test_masked_truncation_leaves_every_mask_and_keeps_the_baseline() -> None:
    # B8
    batch = make_batch(
        [
            rollout(1.0, segment([1], [7] * 4, [1] * 4)),
            rollout(0.0, segment([1], [7] * 6, [1] * 6), sample=1, status=RolloutStatus.TRUNCATED_TOKENS),
        ]
    )
    advantages, _ = get_advantage("grpo")(
        batch["token_level_rewards"],
        batch["response_mask"],
        batch["group"],
        valid=batch["valid"],
        config=AlgorithmConfig(),
    )
    assert advantages[0, 0] > 0
    mask_truncated(batch)
    assert batch["response_mask"].sum(-1).tolist() == [4, 0]
    assert batch["loss_mask"].sum(-1).tolist() == [4, 0]


def test_no_rollout_at_all_gives_an_empty_batch() -> None:
    assert len(make_batch([])) == 0


def test_a_field_cannot_be_replaced_by_other_values() -> None:
    batch = make_batch([rollout(1.0, segment([1], [7], [1]))])
    union(batch, {"old_log_probs": torch.ones(1, 1)})
    union(batch, {"old_log_probs": torch.ones(1, 1)})
    with pytest.raises(ConfigError, match="old_log_probs"):
        union(batch, {"old_log_probs": torch.zeros(1, 1)})
