from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError, InfraError
from agentgym.tool import BaseTool
from agentgym.tool_files import load_tools
from agentgym.toolbox import Toolbox, ToolLimits
from agentgym.tools.mcp import mcp_tools
from agentgym.types import ToolCall

pytest.importorskip("mcp", reason="needs the extra mcp")

SERVER = Path(__file__).with_name("mcp_server.py")
PATIENT = ToolLimits(call_timeout=90, release_timeout=20)
"""Starting a server takes long on a busy machine."""
COMMAND = [sys.executable, str(SERVER)]


async def run(toolbox: Toolbox, tool: str, /, **arguments: Any) -> tuple[str, bool]:
    [result] = await toolbox.execute([ToolCall(name=tool, arguments=arguments, id="c")])
    return result.response.text or "", result.error


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children() -> list[str]:
    """MCP servers over stdio that this process has started and that still live."""
    listed = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if line.endswith("mcp_server.py")]


@pytest.fixture(scope="module")
def stdio() -> list[BaseTool]:
    """The tools of the server over stdio."""
    return mcp_tools(COMMAND, start_timeout=90)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server over HTTP."""
    process = subprocess.Popen([*COMMAND, "http"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> list[BaseTool]:
    """The tools over either transport."""
    if request.param == "stdio":
        found: list[BaseTool] = request.getfixturevalue("stdio")
        return found
    address = request.getfixturevalue("url")
    deadline = time.monotonic() + 30
    while True:
        try:
            return mcp_tools(address)
        except ConfigError:  # the port is bound before the server accepts
            if time.monotonic() > deadline:
                raise


async def test_schemas_answers_and_errors(tools: list[BaseTool]) -> None:
    assert [tool.name for tool in tools] == ["add", "note", "fail", "die", "pid", "mixed"]
    add = tools[0].tool_schema["function"]
    assert add["description"] == "Adds two numbers."
    assert add["parameters"]["required"] == ["a"]
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    toolbox = Toolbox(tools, limits=PATIENT)
    assert await run(toolbox, "add", a=40, b=2) == ("42", False)
    assert await run(toolbox, "add", a=1) == ("2", False)
    text, error = await run(toolbox, "add", b=1)
    assert error
    assert "missing required parameter 'a'" in text
    text, error = await run(toolbox, "fail")
    assert error
    assert "das geht nicht: ü" in text
    [result] = await toolbox.execute([ToolCall(name="mixed", arguments={})])
    assert result.response.text == "看"
    assert result.response.image == ["data:image/png;base64,AAAA"]
    assert await toolbox.rewards() == {}
    await toolbox.release()


async def test_over_stdio_a_session_has_a_server_of_its_own_which_ends_with_it(stdio: list[BaseTool]) -> None:  # D8
    async def play(i: int) -> tuple[str, str]:
        toolbox = Toolbox(stdio, limits=PATIENT)
        try:
            answers = await toolbox.execute(
                [ToolCall(name="note", arguments={"text": str(i)}), ToolCall(name="pid", arguments={})]
            )
            text, _ = await run(toolbox, "note", text="again")
            return text, answers[1].response.text or ""
        finally:
            await toolbox.release()

    played = await asyncio.gather(*[play(i) for i in range(3)])
    assert [text for text, _ in played] == [f"{i}; again" for i in range(3)]
    pids = {int(pid) for _, pid in played}
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


async def test_a_server_that_dies_is_an_infrastructure_failure_and_the_next_session_has_another(
    stdio: list[BaseTool],
) -> None:
    toolbox = Toolbox(stdio, limits=PATIENT)
    assert await run(toolbox, "add", a=1) == ("2", False)
    with pytest.raises(InfraError, match=r"MCP server .* is lost"):
        await run(toolbox, "die")
    with pytest.raises(InfraError, match=r"MCP server .* is lost"):
        await run(toolbox, "add", a=1)
    await toolbox.release()
    again = Toolbox(stdio, limits=PATIENT)
    assert await run(again, "add", a=1) == ("2", False)
    await again.release()


async def test_a_cancelled_session_leaves_no_server(stdio: list[BaseTool]) -> None:  # D1
    for delay in (0.0, 0.3, 2.0):
        toolbox = Toolbox(stdio, limits=PATIENT)
        task = asyncio.create_task(run(toolbox, "pid"))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait({task})
        await toolbox.release()
    assert not children()
    server = stdio[0]._server  # type: ignore[attr-defined]
    assert server.sessions.live == 0


async def test_in_a_tool_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        f"tools:\n  - mcp: {{command: ['{sys.executable}', '{SERVER}']}}\n    tools: [add, pid]\n    prefix: my_\n"
        f"  - class_name: agentgym.tools.calculator.calculator\n"
    )
    tools = await asyncio.to_thread(load_tools, file)
    assert [tool.name for tool in tools] == ["my_add", "my_pid", "calculator"]
    toolbox = Toolbox(tools, limits=PATIENT)
    assert await run(toolbox, "my_add", a=1) == ("2", False)
    await toolbox.release()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mcp: {command: [/no/such/program]}", "cannot be listed"),
        ("mcp: {command: []}", "command"),
        ("mcp: {comand: [a]}", "comand"),
        ("mcp: http://127.0.0.1:9/mcp", "cannot be listed"),
        (f"mcp: {{command: ['{sys.executable}', -c, 'pass']}}", "cannot be listed"),
        (
            f"mcp: {{command: ['{sys.executable}', '{SERVER}']}}\n    tools: [ad]",
            "unknown tool 'ad'. Did you mean 'add'",
        ),
    ],
)
def test_wrong_entries_say_what_is_wrong(tmp_path: Path, entry: str, words: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_tools(file)
    assert words in str(caught.value)
    assert "tools[0]" in str(caught.value)
