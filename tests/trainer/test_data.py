"""The order of training tasks, and where a resumed run goes on."""

from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.trainer.data import TaskSampler
from agentgym.trainer.tasks import TaskRef

IDS = [f"t{i}" for i in range(6)]


def sampler(batch_size: int = 2, seed: int = 0, shuffle: bool = True) -> TaskSampler:
    return TaskSampler([TaskRef(env="e", task_id=id) for id in IDS], batch_size=batch_size, seed=seed, shuffle=shuffle)


def test_each_task_comes_once_per_epoch_in_another_order() -> None:
    source = sampler()
    epochs = [[d.task_id for _ in range(3) for d in source.next_batch()] for _ in range(3)]
    assert all(sorted(epoch) == IDS for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("position", [0, 2, 3, 4, 6])  # 3: exactly at the end of an epoch
def test_a_sampler_put_at_a_position_goes_on_as_if_never_stopped(position: int) -> None:
    # G1
    whole = sampler()
    expected = [whole.next_batch() for _ in range(9)]
    resumed = sampler()
    resumed.position = position
    assert [resumed.next_batch() for _ in range(9 - position)] == expected[position:]


def test_groups_are_told_apart_by_task_and_draw() -> None:
    # C4
    source = sampler(batch_size=6)
    groups = [d.group for _ in range(2) for d in source.next_batch()]
    assert len(set(groups)) == 12


def test_a_rest_smaller_than_a_batch_is_dropped_for_the_epoch() -> None:
    source = sampler(batch_size=4)
    assert source.steps_per_epoch == 1
    assert [d.epoch for _ in range(2) for d in source.next_batch()] == [0] * 4 + [1] * 4


def test_without_shuffling_the_order_is_the_given_one() -> None:
    source = sampler(batch_size=3, shuffle=False)
    assert [d.task_id for _ in range(4) for d in source.next_batch()] == IDS * 2


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers() -> None:
    # E9
    with pytest.raises(ConfigError, match=r"batch_size=8 .* 6 training tasks"):
        sampler(batch_size=8)
