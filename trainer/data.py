"""Which tasks come next: a function of seed and position, so a resumed run draws what the first would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentgym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One drawn task. ``number`` counts draws from the start of the run and makes the group key unique."""

    task_id: str
    number: int
    epoch: int

    @property
    def group(self) -> str:
        """Key of the sampled prompt: task and draw, never its text."""
        return f"{self.task_id}@{self.number}"


class TaskSampler:
    """Draws every task once per epoch, in an order that depends on seed and epoch only.

    The only state is the number of batches drawn; an epoch ends where fewer tasks than a batch are left (they are
    dropped for that epoch), so every batch has the same size.

    Args:
        task_ids: the training tasks.
        batch_size: tasks per step; at most ``len(task_ids)``.
        seed: of the order.
        shuffle: False keeps the given order in every epoch.
    """

    def __init__(self, task_ids: Sequence[str], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size > len(task_ids):
            raise ConfigError(
                f"data.batch_size={batch_size} is more than the {len(task_ids)} training tasks; "
                f"lower data.batch_size to at most {len(task_ids)}"
            )
        self.task_ids = list(task_ids)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        """Batches drawn since the start of the run."""
        self._order: tuple[int, list[int]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.task_ids) // self.batch_size

    def next_batch(self) -> list[Draw]:
        """The next ``batch_size`` tasks; advances the position."""
        epoch, step = divmod(self.position, self.steps_per_epoch)
        order = self._epoch_order(epoch)
        first = self.position * self.batch_size
        self.position += 1
        return [
            Draw(task_id=self.task_ids[order[step * self.batch_size + i]], number=first + i, epoch=epoch)
            for i in range(self.batch_size)
        ]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.task_ids)))
            if self.shuffle:
                rng = np.random.default_rng([self.seed, epoch])
                order = [int(i) for i in rng.permutation(len(order))]
            self._order = (epoch, order)
        return self._order[1]
