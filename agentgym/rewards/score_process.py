"""A process of `ParallelManager`: one JSON line in (the function, then calls), one out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, BinaryIO

from agentgym.errors import AgentGymError, EnvError, boundary
from agentgym.rewards.functions import ScoreFunction


def main() -> None:
    """Serve until the input ends."""
    # What the function prints must not look like an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lines: BinaryIO = sys.stdin.buffer
    setup = json.loads(lines.readline())
    function = ScoreFunction(setup["path"], setup["name"], setup["kwargs"])
    function.check()
    _write(answers, {"ready": True})
    for line in lines:
        _write(answers, answer(function, json.loads(line)))


def answer(function: ScoreFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """What one call came to: its value, or what it raised."""
    try:
        with boundary("the reward function"):
            return {"value": _plain(asyncio.run(_call(function, arguments)))}
    except EnvError as error:
        cause = error.__cause__ or error
        return {"error_type": error.error_type, "message": str(cause), "traceback": error.traceback_text}
    except AgentGymError as error:
        return {"error_type": type(error).__name__, "message": str(error), "traceback": ""}


async def _call(function: ScoreFunction, arguments: dict[str, Any]) -> Any:
    value = function.target(**arguments, **function.kwargs)  # no thread: the process waits for nothing else
    return await value if hasattr(value, "__await__") else value


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's, which JSON can write."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if value is None or isinstance(value, bool | int | float | str | list):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def _write(answers: BinaryIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
