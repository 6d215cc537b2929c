"""`EvalReport`: what an evaluation found, as numbers and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.console import duration
from agentgym.evaluation.rows import Row
from agentgym.statistics import (
    Estimate,
    Method,
    clustered_mean,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
    sample_sizes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """A figure for k samples of a task, averaged over the tasks that have at least k scored ones."""

    k: int
    pass_at: float
    """Chance that one of k samples is solved."""
    pass_hat: float
    """Chance that all k are."""
    majority: float
    """Mean reward of the answer that most of k give."""
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The same figures for a part of the rollouts, e.g. one data source."""

    samples: int
    errors: int
    reward: Estimate | None
    solved: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """One task."""

    task_id: str
    data_source: str
    rewards: Sequence[float]
    """Of its scored samples."""
    errors: int

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What an evaluation found. Failures are not zeros: they are left out of the mean and counted as ``errors``."""

    env: str
    policy: str
    split: str
    tasks: int
    n: int
    """Samples asked for per task."""
    samples: int
    """Rollouts played, failed ones included."""
    errors: int
    """Rollouts that could not be scored."""
    reward: Estimate | None
    """Over the scored rollouts, clustered by task; None where nothing could be scored."""
    reward_errors_as_zero: float | None
    """What the mean would be if every error were a 0."""
    solved: float | None
    """Share of scored rollouts with a reward of at least ``success``."""
    success: float
    at_k: Sequence[AtK]
    components: Mapping[str, Estimate] = field(default_factory=dict)
    sources: Mapping[str, Part] = field(default_factory=dict)
    """By data source; empty where there is only one."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    error_types: Mapping[str, int] = field(default_factory=dict)
    turns: float = 0.0
    tokens: float = 0.0
    """That the model wrote."""
    tool_calls: float = 0.0
    tool_errors: float = 0.0
    parse_errors: float = 0.0
    rollout_seconds: float = 0.0
    """Means per rollout."""
    seconds: float = 0.0
    """Wall clock of this call; a resumed evaluation counts its last part."""
    first_error: str | None = None
    per_task: Sequence[TaskResult] = ()

    @property
    def mean(self) -> float | None:
        """Mean reward; None where nothing could be scored."""
        return None if self.reward is None else self.reward.mean

    @property
    def scored(self) -> int:
        """Rollouts that have a reward."""
        return self.samples - self.errors

    @property
    def missing(self) -> int:
        """Rollouts that were not played: the evaluation was stopped."""
        return self.tasks * self.n - self.samples

    @property
    def coverage(self) -> float:
        """Share of the rollouts asked for that were scored."""
        return self.scored / (self.tasks * self.n)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        derived = {"mean": self.mean, "scored": self.scored, "coverage": self.coverage, "missing": self.missing}
        return {**derived, **asdict(self)}

    def lines(self) -> list[str]:
        """The report as a table of text."""
        each = f", {self.n} samples each" if self.n > 1 else ""
        rows = [
            ("policy", self.policy),
            ("tasks", f"{self.tasks} of {self.env} ({self.split}){each}"),
            ("scored", f"{self.scored} of {self.tasks * self.n} rollouts (coverage {self.coverage:.3f})"),
        ]
        if self.reward is None:
            rows.append(("reward", "none: no rollout could be scored"))
        else:
            rows.append(("reward", f"{_interval(self.reward)} 95 % confidence"))
            rows.append(("solved", f"{self.solved:.1%}"))
        if len(self.at_k) > 1:
            rows += self._at_k_rows()
        rows += [(f"  {name}", _interval(value)) for name, value in self.components.items()]
        rows += [(f"  {name}", _part(part)) for name, part in self.sources.items()]
        rows.append(("turns", f"{self.turns:.2f}"))
        if self.tokens:
            rows.append(("tokens", f"{self.tokens:.1f}"))
        rows.append(
            ("tool calls", f"{self.tool_calls:.2f}  (errors {self.tool_errors:.2f}, malformed {self.parse_errors:.2f})")
        )
        rows.append(("time", f"{duration(self.seconds)} ({self.rollout_seconds:.2f} s a rollout)"))
        width = max(11, *(len(name) for name, _ in rows))
        return [f"{name:<{width}} {value}".rstrip() for name, value in rows] + self.warnings()

    def warnings(self) -> list[str]:
        """What a reader must not overlook: errors and what is missing; empty if there is nothing."""
        lines = []
        if self.errors:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.error_types.items())
            lines += [
                "",
                f"ERRORS: {self.errors} of {self.samples} rollouts could not be scored (coverage {self.coverage:.3f}); "
                f"the reward above leaves them out.",
                f"  kinds  {kinds}",
                f"  first  {(self.first_error or '').partition(chr(10))[0]}",
            ]
            if self.reward_errors_as_zero is not None:
                lines.append(f"  reward if errors were zeros  {self.reward_errors_as_zero:.3f}")
        if self.missing:
            lines += ["", f"STOPPED: {self.missing} of {self.tasks * self.n} rollouts were not played."]
        return lines

    def _at_k_rows(self) -> list[tuple[str, str]]:
        shown = [("", "".join(f"{f'k={entry.k}':>8}" for entry in self.at_k))]
        for name, attribute in (("pass@k", "pass_at"), ("pass^k", "pass_hat"), ("majority@k", "majority")):
            shown.append((name, "".join(f"{getattr(entry, attribute):>8.3f}" for entry in self.at_k)))
        return shown


def summarise(
    rows: Sequence[Row],
    *,
    env: str,
    policy: str,
    split: str,
    tasks: int,
    n: int,
    success: float = 1.0,
    seconds: float = 0.0,
    method: Method = "t",
    answer_key: Callable[[str], str] = str.strip,
) -> EvalReport:
    """The report of ``rows``.

    Args:
        rows: one per (task, sample).
        tasks: that were asked for.
        n: samples per task that were asked for.
        success: rewards of at least this count as solved.
        answer_key: what equal answers share, for majority votes.
    """
    scored = [row for row in rows if row.reward is not None]
    failed = [row for row in rows if row.reward is None]
    sources = sorted({row.data_source for row in rows})
    rewards = [row.reward for row in scored if row.reward is not None]
    return EvalReport(
        env=env,
        policy=policy,
        split=split,
        tasks=tasks,
        n=n,
        samples=len(rows),
        errors=len(failed),
        reward=_reward(scored, method),
        reward_errors_as_zero=sum(rewards) / len(rows) if rewards else None,
        solved=_share(scored, success),
        success=success,
        at_k=_at_k(scored, n, success, answer_key),
        components=_components(scored, method),
        sources={name: _part_of([r for r in rows if r.data_source == name], success, method) for name in sources}
        if len(sources) > 1
        else {},
        statuses=dict(Counter(str(row.status) for row in rows).most_common()),
        error_types=dict(Counter(row.error_type or str(row.status) for row in failed).most_common()),
        turns=_mean([row.turns for row in rows]),
        tokens=_mean([row.tokens for row in rows]),
        tool_calls=_mean([row.tool_calls for row in rows]),
        tool_errors=_mean([row.tool_errors for row in rows]),
        parse_errors=_mean([row.parse_errors for row in rows]),
        rollout_seconds=_mean([row.seconds for row in rows]),
        seconds=seconds,
        first_error=failed[0].error if failed else None,
        per_task=_per_task(rows),
    )


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each task, in the order of their first ones."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.task_id, []).append(row)
    return grouped


def _reward(scored: Sequence[Row], method: Method) -> Estimate | None:
    return clustered_mean(
        [[r.reward for r in group if r.reward is not None] for group in by_task(scored).values()], method=method
    )


def _share(scored: Sequence[Row], success: float) -> float | None:
    return _mean([row.reward >= success for row in scored if row.reward is not None]) if scored else None


def _part_of(rows: Sequence[Row], success: float, method: Method) -> Part:
    scored = [row for row in rows if row.reward is not None]
    return Part(
        samples=len(rows),
        errors=len(rows) - len(scored),
        reward=_reward(scored, method),
        solved=_share(scored, success),
    )


def _components(scored: Sequence[Row], method: Method) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for name in sorted({name for row in scored for name in row.components}):
        values = [[r.components[name] for r in group if name in r.components] for group in by_task(scored).values()]
        estimate = clustered_mean(values, method=method)
        assert estimate is not None
        found[name] = estimate
    return found


def _at_k(scored: Sequence[Row], n: int, success: float, answer_key: Callable[[str], str]) -> list[AtK]:
    groups = []
    for group in by_task(scored).values():
        rewards = [row.reward for row in group if row.reward is not None]
        groups.append((rewards, [answer_key(row.answer) for row in group]))
    entries = []
    for k in sample_sizes(n):
        enough = [(rewards, answers) for rewards, answers in groups if len(rewards) >= k]
        if not enough:
            continue
        counts = [(len(rewards), sum(reward >= success for reward in rewards)) for rewards, _ in enough]
        entries.append(
            AtK(
                k=k,
                pass_at=_mean([pass_at_k(total, right, k) for total, right in counts]),
                pass_hat=_mean([pass_hat_k(total, right, k) for total, right in counts]),
                majority=_mean([majority_at_k(answers, rewards, k) for rewards, answers in enough]),
                tasks=len(enough),
            )
        )
    return entries


def _per_task(rows: Sequence[Row]) -> list[TaskResult]:
    return [
        TaskResult(
            task_id=task_id,
            data_source=group[0].data_source,
            rewards=[row.reward for row in group if row.reward is not None],
            errors=sum(row.reward is None for row in group),
        )
        for task_id, group in by_task(rows).items()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _interval(value: Estimate) -> str:
    return f"{value.mean:.3f}  [{value.low:.3f}, {value.high:.3f}]"


def _part(part: Part) -> str:
    errors = f", {part.errors} errors" if part.errors else ""
    figure = "none" if part.reward is None else _interval(part.reward)
    return f"{figure}  ({part.samples} samples{errors})"
