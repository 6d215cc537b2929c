"""Dynamic sampling: groups without reward spread are dropped and more are sampled. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from agentgym.errors import AgentGymError
from agentgym.trainer.algorithms.config import FilterConfig

G = TypeVar("G")

EQUAL_REWARDS = 1e-6
"""Relative spread below which scores count as equal; their advantages would be 0."""


class FilterExhausted(AgentGymError):
    """Too few groups with reward spread after ``max_gen_batches`` rounds."""


def has_spread(scores: Iterable[float | None]) -> bool:
    """True if at least two scores are numbers and they differ (by more than 1e-6 relative)."""
    numbers = [s for s in scores if s is not None and math.isfinite(s)]
    if len(numbers) < 2:
        return False
    low, high = min(numbers), max(numbers)
    return high - low > EQUAL_REWARDS * max(abs(low), abs(high))


class GroupCollector(Generic[G]):
    """Collects the groups of one step over at most ``max_gen_batches`` generation rounds.

    The caller samples new prompts for each round and never puts dropped ones back, so the data position after the step
    is the number of prompts sampled, and that is what a checkpoint stores.

    Example:
        >>> collector = GroupCollector(2, FilterConfig(enabled=True))
        >>> while not collector.finished:
        ...     collector.add(generate(collector.missing))  # pairs of (group, scores)
        >>> groups = collector.take()  # two groups, or None: log a skipped step
    """

    def __init__(self, target: int, config: FilterConfig) -> None:
        self.target = target
        self.config = config
        self.kept: list[G] = []
        self.rounds = 0
        self.without_spread = 0

    def add(self, groups: Iterable[tuple[G, Sequence[float | None]]]) -> None:
        """Take in one round: each group with the scores of its rollouts (None: not scorable)."""
        self.rounds += 1
        for group, scores in groups:
            if not self.config.enabled or has_spread(scores):
                self.kept.append(group)
            else:
                self.without_spread += 1

    @property
    def missing(self) -> int:
        """Groups still needed."""
        return max(self.target - len(self.kept), 0)

    @property
    def finished(self) -> bool:
        """Enough groups, or no round left."""
        return self.missing == 0 or self.rounds >= self.config.max_gen_batches

    def take(self) -> list[G] | None:
        """Exactly ``target`` groups; a smaller batch never leaves.

        Returns:
            None if there are too few and ``when_exhausted`` is ``skip``.

        Raises:
            FilterExhausted: too few, and ``when_exhausted`` is ``stop``.
        """
        if self.missing == 0:
            return self.kept[: self.target]
        if self.config.when_exhausted == "skip":
            return None
        raise FilterExhausted(
            f"{len(self.kept)} of {self.target} groups had reward spread after {self.rounds} generation rounds "
            f"({self.without_spread} had none). The tasks are too easy or too hard for this model; change the data, "
            f"raise algo.filter_groups.max_gen_batches, or set algo.filter_groups.when_exhausted=skip"
        )

    def metrics(self) -> dict[str, float]:
        """Counts of the step: rounds, kept, without_spread, and skipped (1.0 if too few)."""
        return {
            "rounds": float(self.rounds),
            "kept": float(len(self.kept)),
            "without_spread": float(self.without_spread),
            "skipped": float(self.missing > 0),
        }
