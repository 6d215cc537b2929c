"""The task lists of environments, built once per process for each set of constructor arguments.

Every session has an environment of its own; without this each of them would generate or read all tasks again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.errors import ConfigError, did_you_mean
from agentgym.types import Task

MAX_LISTS = 64
"""So many lists are kept; the one that was not asked for the longest goes first."""


class TaskList:
    """The tasks of one split, loaded at the first use. Threads that come meanwhile wait for the one that loads."""

    def __init__(self) -> None:
        self.tasks: Sequence[Task] = ()
        self._by_id: dict[str, Task] = {}
        self._loaded = False
        self._lock = threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._loaded

    def load(self, source: Callable[[], Sequence[Task]]) -> None:
        """Fill the list from ``source``, unless it is filled. Blocks."""
        with self._lock:
            if not self._loaded:
                self.tasks = source()
                self._by_id = {task.id: task for task in self.tasks}
                self._loaded = True

    def find(self, task_id: str, *, where: str) -> Task:
        """The task of that id. Raises `ConfigError` with the nearest id."""
        task = self._by_id.get(task_id)
        if task is None:
            raise ConfigError(
                f"{where} has no task {task_id!r}.{did_you_mean(str(task_id), self._by_id)} "
                f"It has {len(self.tasks)} tasks, the first is {self.tasks[0].id!r}"
            )
        return task


_lists: OrderedDict[object, TaskList] = OrderedDict()
_lists_lock = threading.Lock()


def task_list(cls: type, kwargs: Mapping[str, Any] | None, split: str) -> TaskList:
    """The list that all instances of ``cls`` made with ``kwargs`` share.

    A list of one's own, if the arguments are unknown (None) or hold more than plain data: such cannot be compared.
    """
    if kwargs is None:
        return TaskList()
    try:
        key = (cls, split, _frozen(kwargs))
    except TypeError:
        return TaskList()
    with _lists_lock:
        found = _lists.setdefault(key, TaskList())
        _lists.move_to_end(key)
        while len(_lists) > MAX_LISTS:
            _lists.popitem(last=False)
    return found


def _frozen(value: Any) -> object:
    """A hashable form of plain data that tells 1 from True and from 1.0. Raises ``TypeError`` for anything else."""
    if isinstance(value, Mapping):
        return ("dict", *sorted((str(name), _frozen(part)) for name, part in value.items()))
    if isinstance(value, list | tuple):
        return ("list", *map(_frozen, value))
    if value is None or type(value) in (str, int, float, bool):
        return (type(value).__name__, repr(value))
    raise TypeError(f"{value!r} is not plain data")
