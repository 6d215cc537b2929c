from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.trainer.rollout.gate import Gate


def test_the_window_grows_by_one_for_each_finished_key() -> None:
    gate = Gate(["a", "b", "c", "d"], 2)
    assert [key for key in "abcd" if gate.is_open(key)] == ["a", "b"]
    assert gate.finish("b")
    assert [key for key in "abcd" if gate.is_open(key)] == ["a", "c"]
    assert gate.finish("a")
    assert [key for key in "abcd" if gate.is_open(key)] == ["c", "d"]


def test_finishing_twice_or_before_opening_counts_once() -> None:
    gate = Gate(["a", "b", "c"], 1)
    assert gate.finish("c")  # the window is now a, b
    assert not gate.finish("c")
    assert [key for key in "abc" if gate.is_open(key)] == ["a", "b"]
    gate.finish("a")
    gate.finish("b")
    assert gate.done


def test_the_first_barrier_is_due_at_once_and_waits_for_the_whole_window() -> None:
    gate = Gate(["a", "b", "c"], 2)
    assert gate.due
    assert not gate.passable({"a"})
    assert not gate.passable({"a", "c"})
    assert gate.passable({"a", "b"})


def test_the_next_barrier_is_due_when_half_of_the_turns_ended() -> None:
    gate = Gate([f"k{i}" for i in range(8)], 8)
    gate.passed(6)
    for _ in range(2):
        gate.turn_ended()
        assert not gate.due
    gate.turn_ended()
    assert gate.due
    gate.passed(5)
    assert not gate.due


def test_a_barrier_with_nothing_running_is_due() -> None:
    gate = Gate(["a"], 1)
    gate.passed(1)
    assert not gate.due
    gate.turn_ended()
    assert gate.due


def test_wrong_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        Gate(["a", "b", "a"], 2)
    with pytest.raises(ConfigError, match="limit=0"):
        Gate(["a"], 0)
