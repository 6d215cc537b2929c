"""The order of training tasks, and where a resumed run goes on."""

from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.trainer.data import Curriculum, TaskSampler, load_curriculum
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


def mixture(weights: dict[str, float] | None = None, curriculum: Curriculum | None = None) -> TaskSampler:
    tasks = [TaskRef(env="a", task_id=f"a{i}", difficulty=6 - i) for i in range(6)]
    tasks += [TaskRef(env="b", task_id=f"b{i}", difficulty=i) for i in range(4)]
    return TaskSampler(
        tasks, batch_size=4, seed=0, weights=(weights or {"a": 1.0, "b": 1.0}).__getitem__, curriculum=curriculum
    )


def test_a_mixture_keeps_to_its_weights_in_every_batch() -> None:
    source = mixture({"a": 3.0, "b": 1.0})
    batches = [[draw.env for draw in source.next_batch()] for _ in range(12)]
    assert all(sorted(batch) == ["a", "a", "a", "b"] for batch in batches)
    uneven = mixture({"a": 2.0, "b": 1.0})
    drawn = [draw.env for _ in range(6) for draw in uneven.next_batch()]
    assert (drawn.count("a"), drawn.count("b")) == (16, 8)


def test_each_environment_of_a_mixture_has_its_own_epochs() -> None:
    source = mixture()
    drawn = [draw for _ in range(6) for draw in source.next_batch()]
    ofb = [(draw.epoch, draw.task_id) for draw in drawn if draw.env == "b"]
    assert sorted(ofb) == [(epoch, f"b{i}") for epoch in range(3) for i in range(4)]
    assert len({draw.group for draw in drawn}) == 24


@pytest.mark.parametrize("position", [1, 3, 7])
def test_a_mixture_put_at_a_position_goes_on_as_if_never_stopped(position: int) -> None:
    whole = mixture({"a": 2.0, "b": 1.0})
    expected = [whole.next_batch() for _ in range(9)]
    resumed = mixture({"a": 2.0, "b": 1.0})
    resumed.position = position
    assert [resumed.next_batch() for _ in range(9 - position)] == expected[position:]


def test_the_easy_tasks_come_first_in_the_first_epoch() -> None:
    source = mixture(curriculum=load_curriculum("easy_first"))
    drawn = [draw for _ in range(3) for draw in source.next_batch()]
    assert [draw.task_id for draw in drawn if draw.env == "a"] == ["a5", "a4", "a3", "a2", "a1", "a0"]


def test_a_curriculum_must_order_all_tasks() -> None:
    with pytest.raises(ConfigError, match=r"gave 1 indices for 6 tasks"):
        mixture(curriculum=lambda tasks, epoch, rng: [0])
    tasks = [TaskRef(env="e", task_id=id) for id in IDS]
    with pytest.raises(ConfigError, match=r"task 't0' of 'e' has no 'difficulty'"):
        TaskSampler(tasks, batch_size=2, seed=0, curriculum=load_curriculum("easy_first"))
