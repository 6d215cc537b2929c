"""Which tasks come next: a function of seed and position, so a resumed run draws what the first would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.errors import ConfigError, boundary, did_you_mean
from agentgym.objects import load_object
from agentgym.trainer.tasks import TaskRef

Curriculum = Callable[[Sequence[TaskRef], int, np.random.Generator], Sequence[int]]
"""``(tasks, epoch, rng) -> order``: the indices of all tasks in the order in which the epoch draws them.

It must depend on its arguments only: a resumed run asks again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One drawn task. ``number`` counts draws from the start of the run and makes the group key unique."""

    task_id: str
    number: int
    epoch: int
    env: str
    """Name of the environment, one of a mixture's."""

    @property
    def group(self) -> str:
        """Key of the sampled prompt: task and draw, never its text."""
        return f"{self.task_id}@{self.number}"


class TaskSampler:
    """Draws every task once per epoch, in an order that depends on seed and epoch only.

    The only state is the number of batches drawn. With one environment an epoch ends where fewer tasks than a batch are
    left (they are dropped for that epoch), so every batch has the same size. In a mixture each environment has epochs
    of its own, and the environments take turns in proportion to their weights, in every batch as evenly as it goes.

    Args:
        tasks: the training tasks.
        batch_size: tasks per step; at most ``len(tasks)``.
        seed: of the order.
        shuffle: False keeps the given order in every epoch.
        weights: of the environments of a mixture, by name.
        curriculum: gives the order of an epoch instead.
    """

    def __init__(
        self,
        tasks: Sequence[TaskRef],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: Callable[[str], float] = lambda _: 1.0,
        curriculum: Curriculum | None = None,
    ) -> None:
        if batch_size > len(tasks):
            raise ConfigError(
                f"data.batch_size={batch_size} is more than the {len(tasks)} training tasks; "
                f"lower data.batch_size to at most {len(tasks)}"
            )
        by_env: dict[str, list[TaskRef]] = {}
        for task in tasks:
            by_env.setdefault(task.env, []).append(task)
        self.batch_size = batch_size
        self._total = len(tasks)
        self._streams = [
            _Stream(listed, [seed] if len(by_env) == 1 else [seed, number], shuffle, curriculum)
            for number, listed in enumerate(by_env.values())
        ]
        scale = sum(weights(env) for env in by_env)
        self._shares = [weights(env) / scale for env in by_env]
        self._counts = [0] * len(self._streams)
        self._position = 0

    @property
    def position(self) -> int:
        """Batches drawn since the start of the run; may be set, e.g. to go on from a checkpoint."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = value
        self._counts = [0] * len(self._streams)
        if len(self._streams) > 1:
            for draw in range(value * self.batch_size):
                self._counts[self._next_stream(draw)] += 1

    @property
    def steps_per_epoch(self) -> int:
        return self._total // self.batch_size

    def next_batch(self) -> list[Draw]:
        """The next ``batch_size`` tasks; advances the position."""
        first = self.position * self.batch_size
        if len(self._streams) == 1:
            epoch, step = divmod(self.position, self.steps_per_epoch)
            places = [(epoch, step * self.batch_size + i) for i in range(self.batch_size)]
            drawn = [(epoch, self._streams[0].task(epoch, place)) for epoch, place in places]
        else:
            drawn = [self._draw(first + i) for i in range(self.batch_size)]
        self._position += 1
        return [
            Draw(env=task.env, task_id=task.task_id, number=first + i, epoch=epoch)
            for i, (epoch, task) in enumerate(drawn)
        ]

    def _draw(self, number: int) -> tuple[int, TaskRef]:
        which = self._next_stream(number)
        stream = self._streams[which]
        epoch, place = divmod(self._counts[which], len(stream.tasks))
        self._counts[which] += 1
        return epoch, stream.task(epoch, place)

    def _next_stream(self, number: int) -> int:
        """The environment that is furthest behind its share of the first ``number + 1`` draws."""
        behind = [share * (number + 1) - count for share, count in zip(self._shares, self._counts, strict=True)]
        return behind.index(max(behind))


class _Stream:
    """The tasks of one environment, epoch after epoch."""

    def __init__(
        self, tasks: Sequence[TaskRef], seed: Sequence[int], shuffle: bool, curriculum: Curriculum | None
    ) -> None:
        self.tasks = list(tasks)
        self._seed = list(seed)
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._order: tuple[int, Sequence[int]] | None = (0, self._make_order(0))

    def task(self, epoch: int, place: int) -> TaskRef:
        """The task at a place of an epoch."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._make_order(epoch))
        return self.tasks[self._order[1][place]]

    def _make_order(self, epoch: int) -> Sequence[int]:
        rng = np.random.default_rng([*self._seed, epoch])
        if self._curriculum is not None:
            with boundary("data.curriculum"):
                order = [int(index) for index in self._curriculum(self.tasks, epoch, rng)]
            if sorted(order) != list(range(len(self.tasks))):
                raise ConfigError(
                    f"data.curriculum gave {len(order)} indices for {len(self.tasks)} tasks; expected each index from "
                    f"0 to {len(self.tasks) - 1} once"
                )
            return order
        if self._shuffle:
            return [int(index) for index in rng.permutation(len(self.tasks))]
        return range(len(self.tasks))


def easy_first(tasks: Sequence[TaskRef], epoch: int, rng: np.random.Generator) -> Sequence[int]:
    """The curriculum ``data.curriculum=easy_first``: by difficulty in the first epoch, in random order afterwards."""
    order = [int(index) for index in rng.permutation(len(tasks))]
    if epoch > 0:
        return order
    without = next((task for task in tasks if task.difficulty is None), None)
    if without is not None:
        raise ConfigError(
            f"data.curriculum=easy_first: task {without.task_id!r} of {without.env!r} has no 'difficulty' (a number in "
            f"the task's data, or in a row's extra_info)"
        )
    return sorted(order, key=lambda index: tasks[index].difficulty or 0.0)


CURRICULA: dict[str, Curriculum] = {"easy_first": easy_first}


def load_curriculum(name: str | None) -> Curriculum | None:
    """The curriculum of ``data.curriculum``: a shipped name, ``file.py:name`` or ``module:name``."""
    if name is None:
        return None
    if name in CURRICULA:
        return CURRICULA[name]
    if ":" not in name:
        raise ConfigError(
            f"data.curriculum={name}: expected {', '.join(CURRICULA)}, or `file.py:name` or `module:name` of a "
            f"function.{did_you_mean(name, CURRICULA)}"
        )
    made: Any = load_object(name, what="data.curriculum")
    if not callable(made):
        raise ConfigError(f"data.curriculum={name} is {made!r}, expected a function (tasks, epoch, rng) -> order")
    return made  # type: ignore[no-any-return]
