"""Offline evaluation: the tasks of a split, played by a model or by the environment's own perfect player."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentgym import plugins, registration
from agentgym.console import Console, Progress, duration
from agentgym.errors import AgentGymError, ConfigError
from agentgym.evaluation_config import EvalConfig
from agentgym.loops.base import derive_seed
from agentgym.rollout import Rollout
from agentgym.session import SessionManager

CONFIDENCE = 0.95
Finished = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What an evaluation found. Failures are not zeros: they are left out of the mean and counted as ``errors``."""

    env: str
    policy: str
    split: str
    tasks: int
    samples: int
    """Rollouts, failed ones included."""
    errors: int
    """Rollouts that could not be scored."""
    mean: float | None
    """Mean reward over the scored rollouts; None where nothing could be scored."""
    low: float | None
    high: float | None
    """95 % confidence interval of the mean, clustered by task."""
    solved: float | None
    """Share of scored rollouts with a reward of at least 1."""
    turns: float
    tool_calls: float
    tool_errors: float
    parse_errors: float
    """Means per rollout."""
    seconds: float
    first_error: str | None = None

    @property
    def scored(self) -> int:
        """Rollouts that have a reward."""
        return self.samples - self.errors

    @property
    def coverage(self) -> float:
        """Share of rollouts that were scored."""
        return self.scored / self.samples

    def lines(self) -> Sequence[str]:
        """The report as text, one fact a line."""
        rows = [
            ("policy", self.policy),
            ("tasks", f"{self.tasks} of {self.env} ({self.split}), {self.samples} samples"),
        ]
        if self.mean is None:
            rows.append(("reward", "none: no rollout could be scored"))
        else:
            rows.append(("reward", f"{self.mean:.3f}  [{self.low:.3f}, {self.high:.3f}] 95 % confidence"))
            rows.append(("solved", f"{self.solved:.1%}"))
        if self.errors:
            rows.append(("errors", f"{self.errors} (coverage {self.coverage:.3f}), first: {self.first_error}"))
        rows.append(("turns", f"{self.turns:.2f}"))
        rows.append(
            ("tool calls", f"{self.tool_calls:.2f}  (errors {self.tool_errors:.2f}, malformed {self.parse_errors:.2f})")
        )
        rows.append(("time", duration(self.seconds)))
        return [f"{name:<12}{value}" for name, value in rows]


def evaluate(config: EvalConfig, console: Console | None = None) -> EvalReport:
    """Play ``config.n`` samples of every task and sum up.

    With ``config.output`` the report and every rollout are written there (``report.json``, ``rollouts.jsonl``).

    Raises:
        ConfigError: the environment has no tasks in that split.
    """
    plugins.load(config.plugins)
    start = time.monotonic()
    task_ids = list_task_ids(config)
    console = console if console is not None else Console()
    with console.progress(len(task_ids) * config.n, unit="rollout") as progress:
        finished = _shown(progress)
        play = play_oracle if config.agent == "oracle" else play_model
        rollouts = asyncio.run(play(config, task_ids, finished))
    report = summarise(config, task_ids, rollouts, time.monotonic() - start)
    if config.output is not None:
        write(config.output, report, rollouts)
    return report


def list_task_ids(config: EvalConfig) -> list[str]:
    """Ids of the tasks to play, in the environment's order."""
    env: Any = registration.make(config.env.name, **config.env.kwargs)
    try:
        ids = [task.id for task in env.unwrapped.tasks(config.split)][: config.tasks]
    finally:
        env.close()
    if not ids:
        raise ConfigError(f"environment {config.env.name!r} has no tasks in split {config.split!r}")
    return ids


async def play_oracle(config: EvalConfig, task_ids: Sequence[str], finished: Finished) -> list[Rollout]:
    """The environment's own perfect player, through the same sessions as a model."""
    settings = config.rollout
    async with SessionManager(
        settings.session_limit,
        open_timeout=settings.open_timeout,
        step_timeout=settings.step_timeout,
        session_timeout=settings.session_timeout,
        close_timeout=settings.close_timeout,
    ) as manager:

        async def play(task_id: str, sample: int) -> Rollout:
            start = time.monotonic()
            session = manager.open(
                config.env.name,
                seed=env_seed(config, task_id),
                options={"task_id": task_id, "split": config.split},
                max_turns=config.env.max_turns,
                max_user_turns=config.env.max_user_turns,
                env_kwargs=config.env.kwargs,
            )
            try:
                async with session:
                    assert session.task is not None
                    for turn in session.env.oracle(session.task):
                        await session.step(turn)
                        if session.done:
                            break
            except AgentGymError:
                if session.status is None:
                    raise
            rollout = Rollout(
                env_id=config.env.name,
                task_id=task_id,
                group=task_id,
                sample=sample,
                outcome=session.outcome,
                conversation=list(session.conversation),
                seconds=time.monotonic() - start,
            )
            finished(rollout)
            return rollout

        return await _gather([play(task_id, i) for task_id in task_ids for i in range(config.n)])


async def play_model(config: EvalConfig, task_ids: Sequence[str], finished: Finished) -> list[Rollout]:
    """A model, through the same engine and loop as in training."""
    from agentgym.trainer.requests import loop_sampling, request
    from agentgym.trainer.rollout.engines import RolloutSetup
    from agentgym.trainer.rollout.worker import RolloutWorker

    setup = RolloutSetup(
        plugins=config.plugins, env=config.env, model=config.model, rollout=config.rollout, threads=config.threads
    )
    worker = RolloutWorker(0, setup)
    requests = [
        request(
            config.env,
            config.rollout,
            key=f"{task_id}/{sample}",
            task_id=task_id,
            group=task_id,
            sample=sample,
            split=config.split,
            env_seed=env_seed(config, task_id),
            sampling=loop_sampling(config.rollout, seed=derive_seed(config.seed, "eval", task_id, sample)),
        )
        for task_id in task_ids
        for sample in range(config.n)
    ]
    try:
        return (await worker.generate(requests, finished)).rollouts
    finally:
        await worker.close()


def env_seed(config: EvalConfig, task_id: str) -> int:
    """The environment's seed for a task: the same in every evaluation with this seed."""
    return derive_seed(config.seed, "env", task_id) % 2**31


def summarise(config: EvalConfig, task_ids: Sequence[str], rollouts: Sequence[Rollout], seconds: float) -> EvalReport:
    """The report of the rollouts."""
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_task.setdefault(rollout.task_id, []).append(rollout.reward)
    rewards = [reward for listed in by_task.values() for reward in listed]
    center, low, high = clustered_interval(list(by_task.values()))
    outcomes = [r.outcome for r in rollouts]
    failed = [o for o in outcomes if o.reward is None]
    return EvalReport(
        env=config.env.name,
        policy=config.agent if config.agent is not None else config.model.path,
        split=config.split,
        tasks=len(task_ids),
        samples=len(rollouts),
        errors=len(failed),
        mean=center,
        low=low,
        high=high,
        solved=statistics.fmean(r >= 1.0 for r in rewards) if rewards else None,
        turns=statistics.fmean(o.num_turns for o in outcomes),
        tool_calls=statistics.fmean(o.tool_calls for o in outcomes),
        tool_errors=statistics.fmean(o.tool_errors for o in outcomes),
        parse_errors=statistics.fmean(o.parse_errors for o in outcomes),
        seconds=seconds,
        first_error=failed[0].error if failed else None,
    )


def clustered_interval(clusters: Sequence[Sequence[float]]) -> tuple[float | None, float | None, float | None]:
    """Mean over all values, and its confidence interval when values of one cluster depend on each other.

    The cluster-robust standard error of a mean: ``sqrt(G/(G-1) * sum_g (sum_i (x_gi - mean))^2) / N`` with G clusters
    and N values (Miller 2024, arXiv:2411.00640, eq. 4, with the usual small-sample factor), times the normal quantile.
    A single cluster gives no interval: both ends are the mean.
    """
    values = [x for cluster in clusters for x in cluster]
    if not values:
        return None, None, None
    mean = statistics.fmean(values)
    if len(clusters) < 2:
        return mean, mean, mean
    squares = sum(sum(x - mean for x in cluster) ** 2 for cluster in clusters)
    error = math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / len(values)
    half = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * error
    return mean, mean - half, mean + half


def write(folder: Path, report: EvalReport, rollouts: Sequence[Rollout]) -> None:
    """``report.json`` and ``rollouts.jsonl`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rollout.to_dict(), ensure_ascii=False, default=str) + "\n" for rollout in rollouts]
    (folder / "rollouts.jsonl").write_text("".join(lines))
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")


async def _gather(plays: Sequence[Awaitable[Rollout]]) -> list[Rollout]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(play)) for play in plays]
    return [task.result() for task in tasks]


async def _awaited(play: Awaitable[Rollout]) -> Rollout:
    return await play


def _shown(progress: Progress) -> Finished:
    rewards: list[float] = []
    done = 0

    def finished(rollout: Rollout) -> None:
        nonlocal done
        done += 1
        if rollout.reward is not None:
            rewards.append(rollout.reward)
        progress.update(done, {"reward/mean": statistics.fmean(rewards)} if rewards else {})

    return finished
