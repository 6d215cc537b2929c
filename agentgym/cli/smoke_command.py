"""``agentgym smoke``: does an environment work from the first token to the last release?

The environment's own perfect player plays some tasks of both splits through what training uses: the session manager,
the agent loop, tools and sandbox, and the model's tokens. Only the engine is scripted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.bench_command import table
from agentgym.cli.env_commands import PluginsConfig
from agentgym.config import load_config, section, setting
from agentgym.console import Console
from agentgym.errors import EnvError
from agentgym.evaluation_config import EvalRolloutConfig
from agentgym.generation import Generation, SamplingParams
from agentgym.messages import text_of
from agentgym.resources import ReleaseReport
from agentgym.runner import RolloutRunner
from agentgym.sandbox import close_sandboxes
from agentgym.session import Session
from agentgym.session_manager import SessionManager, SessionStats
from agentgym.settings import EnvConfig, ModelConfig
from agentgym.tokens import Renderer
from agentgym.types import SPLITS, Message, RolloutStatus

if TYPE_CHECKING:
    from agentgym.env import Env
    from agentgym.rollout import Rollout
    from agentgym.runner import RolloutRequest
    from agentgym.tokens.renderer import Increment, Tools

PHASES = ("waiting", "opening", "oracle", "tokens", "steps", "closing")
"""``steps`` is the environment's part: tools, sandbox and score."""
COUNTERS = ("tool_calls", "tool_errors", "parse_errors")


class SmokeConfig(PluginsConfig):
    """What `agentgym smoke` plays."""

    env: EnvConfig = setting(..., "the environment")
    model: ModelConfig = section(ModelConfig, "The model whose tokenizer and chat template are used")
    rollout: EvalRolloutConfig = section(EvalRolloutConfig, "How episodes are played")
    tasks: int = setting(5, "Tasks per split, spread over it", ge=1, synonyms=["n", "limit"])
    solved: float = setting(1.0, "Reward from which on a task counts as solved")
    seed: int = setting(0, "Seed of the environment's episodes", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """What was played, and what is left of it."""

    rollouts: Sequence[Rollout]
    stats: SessionStats
    children: Set[int]
    """Processes that were started and still run."""
    seconds: Mapping[str, float]
    """By phase, summed over the rollouts."""


def smoke_command(overrides: Sequence[str]) -> int:
    """Play, print what happened. Returns 1 if a task was not solved, an episode failed or something is left."""
    from agentgym.trainer.preflight import check_model, check_names, make_env

    config = load_config(SmokeConfig, overrides=overrides)
    check_names(config.plugins, config.env, config.rollout)
    check_model(config.model, config.rollout)
    env = make_env(config.env)
    try:
        requests, script = plan(config, env)
    finally:
        env.close()
    report = asyncio.run(play(config, requests, script))
    return show(config, report, Console())


def plan(config: SmokeConfig, env: Env) -> tuple[list[RolloutRequest], dict[str, list[str]]]:
    """What to play, and by its key what the oracle says, turn by turn, in the format of the tool parser."""
    from agentgym.tokens import get_parser
    from agentgym.trainer.preflight import split_tasks
    from agentgym.trainer.requests import loop_sampling, request

    write = get_parser(config.rollout.parser).render
    requests, script = [], {}
    for split in SPLITS:
        tasks = split_tasks(env, config.env.name, split)
        for task in list(tasks[:: max(1, len(tasks) // config.tasks)][: config.tasks]):
            key = f"{split}/{task.id}"
            script[key] = [write(turn) for turn in env.oracle(task)]
            sampling = loop_sampling(config.rollout, seed=None, greedy=True)
            requests.append(
                request(
                    config.env,
                    config.rollout,
                    key=key,
                    task_id=task.id,
                    group=key,
                    sample=0,
                    split=split,
                    env_seed=config.seed,
                    sampling=sampling,
                )
            )
    return requests, script


async def play(config: SmokeConfig, requests: Sequence[RolloutRequest], script: dict[str, list[str]]) -> SmokeReport:
    """Play the requests side by side, close everything, and look at what is left."""
    from agentgym.tokens import get_parser
    from agentgym.trainer.model import load_tokenizer

    settings = config.rollout
    tokenizer = load_tokenizer(config.model.path, revision=config.model.revision)
    before = children()
    laps = [Lap() for _ in requests]
    async with TimedManager.of(settings) as manager:
        runner = RolloutRunner(
            manager=manager,
            generator=OracleEngine(script, tokenizer),
            renderer=TimedRenderer(tokenizer, template_kwargs=settings.template_kwargs),
            parser=get_parser(settings.parser),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_play(runner, request, lap)) for request, lap in zip(requests, laps, strict=True)
            ]
    await close_sandboxes()
    rollouts = [task.result() for task in tasks]
    stats = manager.stats()
    return SmokeReport(rollouts=rollouts, stats=stats, children=children() - before, seconds=merged(laps))


async def _play(runner: RolloutRunner, request: RolloutRequest, lap: Lap) -> Rollout:
    current_lap.set(lap)
    lap.start()
    return await runner.run(request)


class Lap:
    """Where the time of one rollout went: each mark says what has been done since the one before."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.session: Session | None = None
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    async def played(self) -> None:
        """First release of a session: what came before was its last step."""
        self.mark("steps")


current_lap: ContextVar[Lap] = ContextVar("current_lap")


class TimedManager(SessionManager):
    """Marks when a session begins to open and when it is released."""

    async def admit(self, session: Session) -> None:
        await super().admit(session)
        current_lap.get().session = session
        current_lap.get().mark("waiting")

    def dismiss(self, session: Session, status: RolloutStatus, report: ReleaseReport) -> None:
        super().dismiss(session, status, report)
        current_lap.get().mark("closing")


class TimedRenderer(Renderer):
    """Marks what the tokens take, and with it the end of what came before."""

    def prompt(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        lap = current_lap.get()
        lap.mark("opening")
        if lap.session is not None:
            lap.session.resources.push("clock", lap.played)  # pushed last, so it is released first
        ids = super().prompt(messages, tools)
        lap.mark("tokens")
        return ids

    def extend(self, *args: Any, **kwargs: Any) -> Increment:
        current_lap.get().mark("steps")
        increment = super().extend(*args, **kwargs)
        current_lap.get().mark("tokens")
        return increment

    def decode(self, ids: Sequence[int]) -> str:
        text = super().decode(ids)
        current_lap.get().mark("tokens")
        return text


class OracleEngine:
    """A `Generator` that says what the oracle says."""

    def __init__(self, script: Mapping[str, Sequence[str]], tokenizer: Any) -> None:
        from agentgym.trainer.rollout.scripted import ScriptedEngine

        self._script = script
        self._engine = ScriptedEngine(self._text, tokenizer=tokenizer)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """The oracle's next turn."""
        generation = await self._engine.generate(prompt_ids, sampling, session_id)
        current_lap.get().mark("oracle")
        return generation

    async def release(self, session_id: str) -> None:
        """Forget at which turn the session is."""
        await self._engine.release(session_id)

    def _text(self, key: str, turn: int, _prompt_ids: Sequence[int]) -> str:
        turns = self._script[key]
        if turn >= len(turns):
            raise EnvError(f"the episode goes on after the oracle's {len(turns)} turns; expected its end", task_id=key)
        return turns[turn]


def merged(laps: Sequence[Lap]) -> dict[str, float]:
    """Seconds by phase, summed over the rollouts."""
    return {phase: sum(lap.seconds[phase] for lap in laps) for phase in PHASES}


def children() -> set[int]:
    """Process ids of this process's descendants; none where there is no /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found, new = set[int](), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def show(config: SmokeConfig, report: SmokeReport, console: Console) -> int:
    """Print the report. Returns the exit code."""
    rollouts = report.rollouts
    for line in table([_row(rollout, config) for rollout in rollouts]):
        console.line(line)
    solved = [rollout for rollout in rollouts if is_solved(rollout, config)]
    outcomes = [rollout.outcome for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = f"mean reward {statistics.fmean(rewards):.3f}" if rewards else "no reward"
    calls, errors, malformed = (sum(getattr(o, name) for o in outcomes) for name in COUNTERS)
    stats = report.stats
    leaks = leaks_of(report)
    lines = [
        ("oracle", f"solves {len(solved)} of {len(rollouts)} tasks, {mean}"),
        ("tool calls", f"{calls} (errors {errors}, malformed {malformed})"),
        ("sessions", f"{stats.opened} opened, {stats.closed} closed, at most {stats.peak} at once"),
        ("left behind", "; ".join(leaks) or "nothing"),
        ("time", ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in report.seconds.items())),
    ]
    console.line()
    for name, value in lines:
        console.line(f"{name:<13}{value}")
    for line in _first_failure(rollouts, config):
        console.line(line)
    return 0 if len(solved) == len(rollouts) and not leaks else 1


def is_solved(rollout: Rollout, config: SmokeConfig) -> bool:
    """Whether the episode ended by itself with enough reward."""
    reward = rollout.reward
    return rollout.status is RolloutStatus.COMPLETED and reward is not None and reward >= config.solved


def leaks_of(report: SmokeReport) -> list[str]:
    """What a release should have taken away, in words."""
    stats = report.stats
    counts = {
        "sessions live": stats.live,
        "releases that failed": stats.release_errors,
        "calls that do not end": stats.quarantined,
        "processes": len(report.children),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _row(rollout: Rollout, config: SmokeConfig) -> dict[str, Any]:
    outcome = rollout.outcome
    lengths = [(len(segment.prompt_ids), len(segment.response_ids)) for segment in rollout.segments]
    return {
        "task": rollout.group,
        "status": str(rollout.status),
        "reward": "-" if rollout.reward is None else f"{rollout.reward:g}",
        "solved": "yes" if is_solved(rollout, config) else "NO",
        "turns": outcome.num_turns,
        "calls": outcome.tool_calls,
        "prompt tokens": max((prompt for prompt, _ in lengths), default=0),
        "response tokens": sum(response for _, response in lengths),
        "seconds": f"{rollout.seconds:.2f}",
    }


def _first_failure(rollouts: Sequence[Rollout], config: SmokeConfig) -> list[str]:
    """The first fault with its traceback, or else the first conversation that did not solve its task."""
    failed = next((rollout for rollout in rollouts if rollout.status.failed), None)
    if failed is not None:
        return ["", f"task {failed.group!r} {failed.status}:", str(failed.outcome.error).rstrip()]
    unsolved = next((rollout for rollout in rollouts if not is_solved(rollout, config)), None)
    if unsolved is None:
        return []
    limits = config.rollout.max_prompt_length, config.rollout.max_response_length
    why = f"{unsolved.status}, reward {unsolved.reward:g}" if unsolved.reward is not None else str(unsolved.status)
    if unsolved.status is RolloutStatus.TRUNCATED_TOKENS:
        why += f": raise rollout.max_prompt_length={limits[0]} or rollout.max_response_length={limits[1]}"
    said = [f"[{message['role']}] {text_of(message)}" for message in unsolved.conversation]
    return ["", f"task {unsolved.group!r} was not solved ({why}):", *said]
