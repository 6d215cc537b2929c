"""Task lists that the environments of a process share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.task_lists import MAX_LISTS, TaskList, task_list
from agentgym.types import Task


class Some:
    pass


def test_equal_plain_arguments_share_a_list_and_others_do_not() -> None:
    kwargs = {"digits": [1, 2], "level": {"a": 1, "b": None}}
    same = {"level": {"b": None, "a": 1}, "digits": (1, 2)}
    assert task_list(Some, kwargs, "train") is task_list(Some, same, "train")
    different: list[Any] = [
        {"digits": [2, 1]},
        {"digits": [1, 2]},
        {"digits": True},
        {"digits": 1},
        {"digits": 1.0},
        {},
    ]
    lists = [task_list(Some, other, "train") for other in different]
    assert len({id(found) for found in lists}) == len(different)
    assert task_list(Some, kwargs, "train") is not task_list(Some, kwargs, "validation")
    for unknown in (None, {"digits": object()}, {"digits": float}):
        assert task_list(Some, unknown, "train") is not task_list(Some, unknown, "train")


def test_the_oldest_lists_are_dropped() -> None:
    first = task_list(Some, {"n": -1}, "train")
    for n in range(MAX_LISTS - 1):
        task_list(Some, {"n": n}, "train")
    assert task_list(Some, {"n": -1}, "train") is first  # asked for again: the youngest
    task_list(Some, {"n": MAX_LISTS}, "train")
    assert task_list(Some, {"n": -1}, "train") is first
    for n in range(MAX_LISTS):
        task_list(Some, {"n": n + 1000}, "train")
    assert task_list(Some, {"n": -1}, "train") is not first


def test_threads_load_a_list_once_and_a_failed_load_is_tried_again() -> None:
    found = TaskList()
    calls = []
    barrier = threading.Barrier(4)

    def source() -> list[Task]:
        calls.append(1)
        return [Task(id="one", prompt="?")]

    def load() -> None:
        barrier.wait()
        found.load(source)

    def broken() -> list[Task]:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        found.load(broken)
    assert not found.loaded
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found.find("one", where="here").id == "one"
    with pytest.raises(ConfigError, match=r"here has no task 'onne'. Did you mean 'one'\?"):
        found.find("onne", where="here")
