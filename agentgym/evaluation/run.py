"""`evaluate`: plays what is missing of an evaluation and sums it up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from agentgym import plugins, registration
from agentgym.atomic import write_atomically
from agentgym.config import dump_config, read_yaml
from agentgym.console import Console, Progress
from agentgym.errors import ConfigError
from agentgym.evaluation.html import write_html
from agentgym.evaluation.players import Finished, play
from agentgym.evaluation.report import EvalReport, summarise
from agentgym.evaluation.results import Results, write_json
from agentgym.evaluation.rows import Key
from agentgym.evaluation_config import EvalConfig
from agentgym.rollout import Rollout

MAY_CHANGE = {
    "": {"n", "tasks", "threads", "output", "interval", "success"},
    "endpoint": {"key_env", "max_retries", "timeout", "requests_per_minute", "stream"},
    "rollout": {"session_limit", "max_slots", "open_timeout", "step_timeout", "session_timeout", "close_timeout"},
}
"""Settings, by section, that do not change what a rollout is: an evaluation can go on with other ones."""


def evaluate(config: EvalConfig, console: Console | None = None, *, resume: bool = False) -> EvalReport:
    """Play ``config.n`` samples of every task and sum up.

    With ``config.output`` every rollout is written there as it ends (``rollouts.jsonl``), and at the end
    ``report.json`` and ``report.html``; also when it is interrupted.

    Args:
        config: what to evaluate.
        console: where progress is shown.
        resume: go on with the evaluation in ``config.output``: only what is missing there or failed is played.

    Raises:
        ConfigError: the environment has no tasks in that split, ``output`` holds another evaluation, or the endpoint
            refuses the key or the model.
        KeyboardInterrupt: after what was played has been kept.
    """
    plugins.load(config.plugins)
    start = time.monotonic()
    console = console if console is not None else Console()
    env: Any = registration.make(config.env.name, **config.env.kwargs)
    try:
        wanted = [(task_id, sample) for task_id in list_task_ids(env, config) for sample in range(config.n)]
        if resume and config.output is not None:
            _check_same(config, config.output)
        with Results(config.output, resume=resume) as results:
            if config.output is not None:
                write_atomically(config.output / "config.yaml", dump_config(config))
            try:
                _play_missing(config, results, wanted, console)
            except KeyboardInterrupt:
                _say_how_to_go_on(console, config, results, wanted)
                raise
            finally:
                results.close(wanted)
                report = _report(config, env, results, wanted, start)
        return report
    finally:
        env.close()


def _play_missing(config: EvalConfig, results: Results, wanted: list[Key], console: Console) -> None:
    todo = results.missing(wanted)
    with console.progress(len(wanted), done=len(wanted) - len(todo), unit="rollout") as progress:
        if todo:
            asyncio.run(play(config, todo, _keep(results, wanted, todo, progress)))


def list_task_ids(env: Any, config: EvalConfig) -> list[str]:
    """Ids of the tasks to play, in the environment's order."""
    ids = [task.id for task in env.unwrapped.tasks(config.split)[: config.tasks]]
    if not ids:
        raise ConfigError(f"environment {config.env.name!r} has no tasks in split {config.split!r}")
    return ids


def _report(config: EvalConfig, env: Any, results: Results, wanted: list[Key], start: float) -> EvalReport:
    rows = [results.rows[key] for key in wanted if key in results.rows]
    report = summarise(
        rows,
        env=config.env.name,
        policy=config.policy,
        split=config.split,
        tasks=len(wanted) // config.n,
        n=config.n,
        success=config.success,
        seconds=time.monotonic() - start,
        method=config.interval,
        answer_key=env.unwrapped.answer_key,
    )
    if config.output is not None and rows:
        write_json(config.output / "report.json", report.to_dict())
        write_html(config.output / "report.html", report)
    return report


def _keep(results: Results, wanted: list[Key], todo: list[Key], progress: Progress) -> Finished:
    """Writes each rollout and shows how far it is, with the score so far."""
    failed = set(todo)
    rewards = [row.reward for key in wanted if key not in failed and (row := results.rows[key]).reward is not None]
    count, total = len(rewards), sum(rewards)
    done = len(wanted) - len(todo)
    errors = 0

    def finished(rollout: Rollout) -> None:
        nonlocal count, total, done, errors
        results.add(rollout)
        done += 1
        if rollout.reward is not None:
            count, total = count + 1, total + rollout.reward
        errors += rollout.status.failed
        progress.update(done, {"rollout/failed": errors} | ({"reward/mean": total / count} if count else {}))

    return finished


def _check_same(config: EvalConfig, folder: Path) -> None:
    """Raise `ConfigError` if the folder holds an evaluation of something else."""
    file = folder / "config.yaml"
    if not file.is_file():
        return
    before, now = _identity(read_yaml(file)), _identity(config.model_dump(mode="json"))
    for key in [key for key in now if before.get(key) != now[key]]:
        raise ConfigError(
            f"{folder} holds an evaluation with {key}={before.get(key)}, not {now[key]}: its rollouts cannot be mixed "
            f"with new ones. Choose another output"
        )


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """The settings, flat, that make an evaluation what it is."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            free = MAY_CHANGE.get(key, set())
            flat |= {f"{key}.{name}": inner for name, inner in value.items() if name not in free}
        elif key not in MAY_CHANGE[""]:
            flat[key] = value
    return flat


def _say_how_to_go_on(console: Console, config: EvalConfig, results: Results, wanted: list[Key]) -> None:
    kept = sum(key in results.rows for key in wanted)
    console.line(f"\nstopped after {kept} of {len(wanted)} rollouts")
    if config.output is not None:
        console.line(f"go on with: agentgym eval --resume output={config.output}")
