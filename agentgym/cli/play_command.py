"""``agentgym play``: a person in the place of the model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TextIO

from agentgym.cli.env_commands import load_env_choice
from agentgym.console import Console
from agentgym.session import Session, SessionManager
from agentgym.settings import EnvConfig

if TYPE_CHECKING:
    from agentgym.types import Message


def play_command(overrides: Sequence[str], *, seed: int, task_id: str | None) -> int:
    """Play one episode with turns from standard input. Returns the exit code: 0, also if the player leaves early."""
    choice = load_env_choice(overrides)
    # The player's line is read between steps, outside of the event loop, so that Ctrl-C works while waiting for it.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            session = runner.run(_open(stack, choice, seed, task_id))
            return _play(runner, session, Console(), sys.stdin)
        finally:
            runner.run(stack.aclose())


async def _open(stack: AsyncExitStack, choice: EnvConfig, seed: int, task_id: str | None) -> Session:
    manager = await stack.enter_async_context(SessionManager(limit=1))
    return await stack.enter_async_context(
        manager.open(
            choice.name,
            seed=seed,
            task_id=task_id,
            max_turns=choice.max_turns,
            max_user_turns=choice.max_user_turns,
            env_kwargs=choice.kwargs,
        )
    )


def _play(runner: asyncio.Runner, session: Session, console: Console, player: TextIO) -> int:
    for line in (*_tool_lines(session.tools), *_message_lines(session.conversation)):
        console.line(line)
    while not session.done:
        turn = read_turn(console, player)
        if turn is None:
            console.line("\nYou left before the end: no reward.")
            return 0
        result = runner.run(session.step(turn))
        for line in _message_lines(result.observation):
            console.line(line)
        if result.reward:
            console.line(f"reward {result.reward:g}")
    outcome = session.outcome
    total = "none (could not be scored)" if outcome.reward is None else f"{outcome.reward:g}"
    console.line(f"The end: {outcome.status}. Reward {total} after {outcome.num_turns} turns.")
    return 0


def read_turn(console: Console, player: TextIO) -> str | None:
    """One turn of the player: a line, and the lines after it while they end with a backslash. None at the end."""
    if player.isatty():
        console.file.write("you> ")
        console.file.flush()
    lines: list[str] = []
    while line := player.readline():
        text = line.removesuffix("\n")
        lines.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            break
    return "\n".join(lines) if lines else None


def _message_lines(messages: Iterable[Message]) -> list[str]:
    lines = []
    for message in messages:
        name = f" {message['name']}" if "name" in message else ""
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        lines += [f"[{message['role']}{name}]", text, ""]
    return lines


def _tool_lines(schemas: Sequence[dict[str, Any]]) -> list[str]:
    if not schemas:
        return []
    lines = ["Tools:"]
    for schema in schemas:
        function = schema["function"]
        arguments = ", ".join(function["parameters"]["properties"])
        lines.append(f"  {function['name']}({arguments})  {function['description']}")
    name = schemas[0]["function"]["name"]
    example = dict.fromkeys(schemas[0]["function"]["parameters"]["properties"], "...")
    call = json.dumps({"name": name, "arguments": example}, ensure_ascii=False)
    return [*lines, f"To call one, type <tool_call>{call}</tool_call>", ""]
