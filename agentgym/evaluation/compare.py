"""Two evaluations side by side, task by task: what changed, and whether it is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentgym.config import read_yaml
from agentgym.errors import ConfigError
from agentgym.evaluation.results import read_rows
from agentgym.evaluation.rows import Row
from agentgym.statistics import Estimate, Method, clustered_mean, paired_difference

COMPARED = ("env", "split", "n", "seed", "data", "reward")
"""Settings in which two evaluations should agree for their difference to mean something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChange:
    """One task in both evaluations."""

    task_id: str
    first: float
    second: float
    """Mean rewards over the scored samples."""

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two evaluations say about each other. Tasks that only one of them could score are left out and counted."""

    first: str
    second: str
    means: tuple[Estimate, Estimate]
    """Over the common tasks, each task counted once."""
    difference: Estimate
    """Mean of second minus first over the common tasks, paired by task."""
    tasks: Sequence[TaskChange]
    """The common tasks, in the order of the first evaluation."""
    only_first: int
    only_second: int
    warnings: Sequence[str] = ()

    @property
    def changed(self) -> list[TaskChange]:
        """Tasks whose mean reward differs, the largest loss first."""
        return sorted((task for task in self.tasks if task.difference), key=lambda task: task.difference)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def lines(self, limit: int | None = 20) -> list[str]:
        """The comparison as text; at most ``limit`` lost and ``limit`` gained tasks are listed."""
        lost = [task for task in self.changed if task.difference < 0]
        gained = [task for task in reversed(self.changed) if task.difference > 0]
        difference = self.difference
        beyond = difference.low > 0 or difference.high < 0
        verdict = "beyond chance" if beyond else "not beyond chance"
        rows = [
            ("A", f"{self.first}: {_interval(self.means[0])}"),
            ("B", f"{self.second}: {_interval(self.means[1])}"),
            ("B - A", f"{difference.mean:+.3f}  [{difference.low:+.3f}, {difference.high:+.3f}] 95 %, {verdict}"),
            ("tasks", f"{len(self.tasks)} in both: {len(gained)} better, {len(lost)} worse, {self._equal} equal"),
        ]
        if self.only_first or self.only_second:
            rows.append(("left out", f"{self.only_first} scored only in A, {self.only_second} only in B"))
        lines = [f"{name:<10}{value}" for name, value in rows] + [f"WARNING: {text}" for text in self.warnings]
        for title, tasks in (("worse in B", lost), ("better in B", gained)):
            if tasks:
                lines += ["", f"{title:<32}{'A':>8}{'B':>8}{'B - A':>9}"]
                lines += [
                    f"  {t.task_id:<30}{t.first:>8.3f}{t.second:>8.3f}{t.difference:>+9.3f}" for t in tasks[:limit]
                ]
            if limit is not None and len(tasks) > limit:
                lines.append(f"  ... and {len(tasks) - limit} more (--all lists them)")
        return lines

    @property
    def _equal(self) -> int:
        return len(self.tasks) - len(self.changed)


def compare(first: Path, second: Path, *, method: Method = "t") -> Comparison:
    """Compare the evaluations in two folders (or files of rollouts).

    Raises:
        ConfigError: one of them is no evaluation, or no task was scored in both.
    """
    rewards = [_rewards(read_rows(folder)) for folder in (first, second)]
    common = [task for task in rewards[0] if task in rewards[1]]
    difference = paired_difference(rewards[0], rewards[1], method=method)
    if difference is None:
        raise ConfigError(f"{first} and {second} have no scored task in common: they are of different environments")
    tasks = [TaskChange(task_id=t, first=_mean(rewards[0][t]), second=_mean(rewards[1][t])) for t in common]
    means = [clustered_mean([[getattr(task, side)] for task in tasks], method=method) for side in ("first", "second")]
    assert means[0] is not None
    assert means[1] is not None
    return Comparison(
        first=str(first),
        second=str(second),
        means=(means[0], means[1]),
        difference=difference,
        tasks=tasks,
        only_first=len(rewards[0]) - len(common),
        only_second=len(rewards[1]) - len(common),
        warnings=_warnings(first, second),
    )


def _rewards(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Rewards of the scored rows by task; tasks without one are left out."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.reward is not None:
            found.setdefault(row.task_id, []).append(row.reward)
    return found


def _warnings(first: Path, second: Path) -> list[str]:
    files = [folder / "config.yaml" for folder in (first, second)]
    if not all(file.is_file() for file in files):
        return []
    configs = [read_yaml(file) for file in files]
    return [
        f"{key} differs: {configs[0][key]} in A, {configs[1][key]} in B"
        for key in COMPARED
        if key in configs[0] and key in configs[1] and configs[0][key] != configs[1][key]
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(value: Estimate) -> str:
    return f"{value.mean:.3f}  [{value.low:.3f}, {value.high:.3f}]"
