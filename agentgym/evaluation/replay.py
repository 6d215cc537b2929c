"""Recorded turns stepped through fresh sessions: does the environment still answer as it did?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym import plugins
from agentgym.errors import AgentGymError
from agentgym.evaluation.records import Record
from agentgym.evaluation.rescore import Environments, ScoreConfig
from agentgym.messages import text_of
from agentgym.rollout import Rollout
from agentgym.session import Session, SessionManager
from agentgym.tokens import ToolParser, get_parser
from agentgym.types import AssistantTurn, Message, RolloutStatus, ToolCall

SHOWN = 120
"""Characters of a text in a difference, around the first one that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One rollout stepped again."""

    name: str
    difference: str | None
    """The first one; None: it went as recorded."""
    skipped: str | None = None
    """Why it was not replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What replaying gave."""

    rollouts: Sequence[Replayed]

    @property
    def different(self) -> list[Replayed]:
        return [one for one in self.rollouts if one.difference is not None]

    @property
    def replayed(self) -> int:
        return sum(one.skipped is None for one in self.rollouts)

    def lines(self, limit: int = 20) -> list[str]:
        """The report as text."""
        equal = self.replayed - len(self.different)
        lines = [f"replayed  {self.replayed} rollouts: {equal} as recorded, {len(self.different)} differ"]
        lines += [f"  {one.name}: {one.difference}" for one in self.different[:limit]]
        if len(self.different) > limit:
            lines.append(f"  ... and {len(self.different) - limit} more")
        if skipped := [one for one in self.rollouts if one.skipped is not None]:
            lines.append(f"skipped   {len(skipped)}, the first ({skipped[0].name}) because {skipped[0].skipped}")
        return lines


def replay(config: ScoreConfig, records: Sequence[Record]) -> ReplayReport:
    """Step the recorded turns of every rollout through a fresh session of its environment.

    Raises:
        ConfigError: an unknown environment.
    """
    plugins.load(config.plugins)
    return ReplayReport(rollouts=asyncio.run(_replay(config, records[: config.limit])))


async def _replay(config: ScoreConfig, records: Sequence[Record]) -> list[Replayed]:
    environments = Environments(config)
    parser = get_parser(config.parser)
    try:
        async with SessionManager(config.concurrency, step_timeout=config.step_timeout) as manager:
            return list(await asyncio.gather(*[_one(config, manager, environments, parser, r) for r in records]))
    finally:
        environments.close()


async def _one(
    config: ScoreConfig, manager: SessionManager, environments: Environments, parser: ToolParser, record: Record
) -> Replayed:
    rollout = record.rollout
    name = f"{rollout.task_id}/{rollout.sample}"
    if rollout.status.failed:
        return Replayed(name=name, difference=None, skipped=f"it ended as {rollout.status}")
    settings = environments.settings(record)
    split = config.split or rollout.split
    session = manager.open(
        settings.name,
        seed=rollout.seed,
        options={"task_id": rollout.task_id, **({"split": split} if split else {})},
        max_turns=settings.max_turns,
        max_user_turns=settings.max_user_turns,
        env_kwargs=settings.kwargs,
    )
    difference: str | None = None
    try:
        async with session:
            difference = await _first_difference(session, rollout, parser, scored=record.own)
            if not session.done:
                await session.truncate(RolloutStatus.TRUNCATED_TURNS)
    except AgentGymError as error:
        difference = difference or f"the environment failed: {str(error).partition(chr(10))[0]}"
    return Replayed(name=name, difference=difference)


async def _first_difference(session: Session, rollout: Rollout, parser: ToolParser, *, scored: bool) -> str | None:
    """What differs first between the recorded episode and this one; None if nothing does."""
    start, turns = split_turns(rollout.conversation)
    if (found := _differs(start, session.conversation, "the first prompt")) is not None:
        return found
    for number, (answer, observed) in enumerate(turns):
        if session.done:
            return f"turn {number}: the episode had ended ({session.status}); {len(turns)} turns are recorded"
        last = number == len(turns) - 1
        cut = last and not observed and rollout.status is RolloutStatus.TRUNCATED_TOKENS
        result = await session.step(recorded_turn(answer, observed, parser, number, cut=cut))
        if (found := _differs(observed, result.observation, f"turn {number}")) is not None:
            return found
    if not session.done:
        if not rollout.status.truncated:
            return f"the episode goes on after its {len(turns)} recorded turns; it had ended as {rollout.status}"
        await session.truncate(rollout.status)
    outcome = session.outcome
    if scored and outcome.status is not rollout.status:
        return f"it ended as {outcome.status}, recorded is {rollout.status}"
    if (rollout.reward is not None or scored) and not _equal(outcome.reward, rollout.reward):
        return f"reward {outcome.reward}, recorded is {rollout.reward}"
    return None


def split_turns(conversation: Sequence[Message]) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """The first prompt, and each assistant message with what followed it."""
    start: list[Message] = []
    turns: list[tuple[Message, list[Message]]] = []
    for message in conversation:
        if message["role"] == "assistant":
            turns.append((message, []))
        else:
            (turns[-1][1] if turns else start).append(message)
    return start, turns


def recorded_turn(
    answer: Message, observed: Sequence[Message], parser: ToolParser, number: int, *, cut: bool
) -> AssistantTurn:
    """The turn that a recorded message stands for.

    A conversation holds a malformed turn as the model wrote it: it is known by the error that answered it, and parsed
    again. A turn whose calls were answered by errors alone had been cut by the length limit.
    """
    text = text_of(answer)
    refused = any(message.get("name") == "error" for message in observed)
    if calls := answer.get("tool_calls"):
        ids = {call["id"] for call in calls}
        ran = any(message.get("tool_call_id") in ids for message in observed)
        given = [
            ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"], id=call["id"])
            for call in calls
        ]
        reason = "length" if cut or (refused and not ran) else "stop"
        return AssistantTurn(content=text, tool_calls=given, finish_reason=reason)  # type: ignore[arg-type]
    if not refused:
        return AssistantTurn(content=text, finish_reason="length" if cut else "stop")
    parsed = parser.parse(text)
    given = [
        ToolCall(name=call.name, arguments=call.arguments, id=f"call{number % 100:02d}{i % 1000:03d}")
        for i, call in enumerate(parsed.tool_calls)
    ]
    ran = any(message.get("name") != "error" for message in observed)
    return AssistantTurn(
        content=parsed.content,
        tool_calls=given,
        errors=parsed.errors,
        finish_reason="length" if given and not ran else "stop",
        raw=text,
    )


def _differs(recorded: Sequence[Message], now: Sequence[Message], where: str) -> str | None:
    for index, (old, new) in enumerate(zip(recorded, now, strict=False)):
        for key in ("role", "name"):
            if key in old and old.get(key) != new.get(key):
                return f"{where}: message {index} has {key} {new.get(key)!r}, recorded is {old.get(key)!r}"
        if text_of(old) != text_of(new):
            before, after = _around(text_of(old), text_of(new))
            return f"{where}: the {_name(old)} message says {after!r}, recorded is {before!r}"
    if len(recorded) != len(now):
        return f"{where}: {len(now)} messages came back, recorded are {len(recorded)}"
    return None


def _around(old: str, new: str) -> tuple[str, str]:
    """The parts of two texts around their first difference."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - SHOWN // 2)
    return old[start : start + SHOWN], new[start : start + SHOWN]


def _name(message: Message) -> str:
    return f"{message['role']} {message['name']}" if "name" in message else message["role"]


def _equal(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) <= 1e-9)
