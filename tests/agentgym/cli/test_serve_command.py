"""``agentgym serve-tools`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentgym.cli import run
from agentgym.toolbox import Toolbox
from agentgym.tools.server import remote_tools
from agentgym.types import ToolCall

TOOLS = '''
from agentgym.tools import BaseTool, ToolResponse, function_tool

@function_tool
def shout(text: str) -> str:
    """Shouts."""
    return text.upper()

class Held(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "held"}}
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="held"), None, {}
    async def release(self, instance_id, **kwargs):
        print("released", flush=True)

held = Held()
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The command as a process, and what it printed at its start."""
    code = f"import sys; sys.argv = ['agentgym', 'serve-tools', *{list(arguments)!r}]; "
    code += "from agentgym.cli import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "AGENTGYM_TOOLS_TOKEN"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split(maxsplit=1) for _ in range(3)]
        yield process, {key: value.strip() for key, value in lines}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_and_releases_its_sessions(file: Path, number: signal.Signals) -> None:
    with serving(str(file), "--port", "0") as (process, printed):
        assert printed["tools"] == "shout, held"
        assert printed["server"].startswith("http://127.0.0.1:")
        token = printed["token"].removeprefix("export AGENTGYM_TOOLS_TOKEN=")
        toolbox = Toolbox(remote_tools(printed["server"], token=token))
        calls = [ToolCall(name="shout", arguments={"text": "é"}), ToolCall(name="held", arguments={})]
        assert [result.response.text for result in await toolbox.execute(calls)] == ["É", "held"]
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [f"{number.name}: releasing 1 sessions", "released"]
        await toolbox.release()


def test_over_a_unix_socket_with_a_token_file(file: Path, tmp_path: Path) -> None:
    socket, token = tmp_path / "socket", tmp_path / "token"
    with serving(str(file), "--unix", str(socket), "--token-file", str(token)) as (_, printed):
        assert printed == {"server": f"unix:{socket}", "tools": "shout, held", "token": f"in {token}"}
        tools = remote_tools(f"unix:{socket}", token=token.read_text().strip())
        assert [tool.name for tool in tools] == ["shout", "held"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--max-sessions", "0"], "--max-sessions 0"),
        (["--lease", "-1"], "--lease -1"),
        (["--sandbox", "dokcer"], "dokcer"),
        (["--token-file", "/"], "token file"),
        (["more.yaml"], "does not exist"),
    ],
)
def test_wrong_input_is_told_before_anything_starts(
    file: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AGENTGYM_TOOLS_TOKEN", raising=False)
    assert run(["serve-tools", str(file), *arguments]) == 2
    assert words in capsys.readouterr().err
