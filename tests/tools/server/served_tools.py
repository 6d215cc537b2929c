"""Tools of every kind, for the tests of the tool server; also loaded as a tool file."""

import asyncio
import os
import time
from typing import Any

from agentgym.tools import BaseTool, ToolContext, ToolError, ToolResponse, function_tool

LOG: list[str] = []
"""What happened, in this process."""


@function_tool
def greet(name: str, excited: bool = False) -> str:
    """Greets somebody."""
    return f"Hello {name}{'!' if excited else '.'}"


@function_tool
async def wait(seconds: float, mark: str = "") -> str:
    """Waits."""
    LOG.append(f"begin {mark}")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        LOG.append(f"cancelled {mark}")
        raise
    LOG.append(f"end {mark}")
    return "waited"


@function_tool
def block(seconds: float) -> str:
    """Blocks its thread."""
    time.sleep(seconds)
    return "blocked"


@function_tool(timeout=0.2)
async def slow() -> str:
    """Takes longer than it may."""
    await asyncio.sleep(5)
    return "never"


@function_tool
def fail(how: str) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Fails in a chosen way, or gives everything that a tool can give."""
    match how:
        case "tool":
            raise ToolError("so sagt es das Werkzeug: ü")
        case "code":
            raise ZeroDivisionError("in the tool")
        case "lost":
            raise ConnectionResetError("database")
    return ToolResponse(text="all", image=[b"\x00\xff", "http://image"]), 0.5, {"n": 3}


@function_tool
def remember(key: str, value: str, context: ToolContext) -> str:
    """Stores a value in the session."""
    context.state[key] = value
    return ", ".join(f"{key}={value}" for key, value in sorted(context.state.items()))


@function_tool
def flood(size: int) -> str:
    """A long text."""
    return "x" * size


@function_tool
def die(once: str = "") -> str:
    """Ends the whole process; with a path only if there is no such file, which it makes."""
    if once and os.path.exists(once):
        return "alive"
    if once:
        open(once, "w").close()
    os._exit(1)


class Counter(BaseTool):
    tool_schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": []},
        },
    }

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, start: int = 0, **_: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        if start < 0:
            raise ToolError("cannot start below 0")
        self.counts[instance_id] = start
        LOG.append(f"create {self.name}")
        return instance_id, ToolResponse(text=f"starts at {start}")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> tuple[ToolResponse, float, Any]:
        self.counts[instance_id] += parameters.get("by", 1)
        return ToolResponse(text=str(self.counts[instance_id])), 0.25, {"count": self.counts[instance_id]}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **_: Any) -> None:
        del self.counts[instance_id]
        LOG.append(f"release {self.name}")


def _named(name: str) -> Counter:
    schema = {**Counter.tool_schema, "function": {**Counter.tool_schema["function"], "name": name}}
    return Counter({}, schema)


count = _named("count")
other = _named("other")
