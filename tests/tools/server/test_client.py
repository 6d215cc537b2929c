"""Tools of a server, used as local ones: same answers, same state, and what happens when the server is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.tool import BaseTool, ToolContext
from agentgym.tool_files import load_tools
from agentgym.toolbox import Toolbox, ToolLimits
from agentgym.tools.server import client as client_module
from agentgym.tools.server import remote_tools
from agentgym.tools.server.process import FOLDER_PREFIX, ServerProcess, remove_stale_folders
from agentgym.tools.server.remote import _process
from agentgym.types import ToolCall

TOKEN = "the-token"
FILE = Path(__file__).with_name("served_tools.py")


@pytest.fixture(autouse=True)
def temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temp folder of its own, with a name that is short enough for sockets."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where it is
    folder = tempfile.mkdtemp(prefix="agt-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    yield
    shutil.rmtree(folder)


async def tools_of(url: str, **options: Any) -> list[BaseTool]:
    """The listing blocks, and the server of these tests lives in the same event loop."""
    return await asyncio.to_thread(remote_tools, url, token=TOKEN, **options)


async def run(toolbox: Toolbox, tool: str, /, **arguments: Any) -> tuple[str, bool]:
    [result] = await toolbox.execute([ToolCall(name=tool, arguments=arguments, id="c")])
    return result.response.text or "", result.error


def texts(results: Any) -> list[str | None]:
    return [result.response.text for result in results]


CALLS = [
    ToolCall(name="greet", arguments={"name": "Zürich 東京 🎯", "excited": True}),  # A16
    ToolCall(name="greet", arguments={}),
    ToolCall(name="greet", arguments={"nam": "a"}),
    ToolCall(name="gret", arguments={}),
    ToolCall(name="fail", arguments={"how": "tool"}),
    ToolCall(name="fail", arguments={"how": "not"}),
    ToolCall(name="slow", arguments={}),
    ToolCall(name="count", arguments={"by": 2}),
    ToolCall(name="count", arguments={"by": "two"}),
    ToolCall(name="other", arguments=""),  # type: ignore[arg-type]
    ToolCall(name="count", arguments=None),  # type: ignore[arg-type]
    ToolCall(name="remember", arguments={"key": "a", "value": "1"}),
    ToolCall(name="remember", arguments={"key": "b", "value": "2"}),
]


async def test_remote_tools_answer_as_local_ones_do(serve: Any) -> None:
    async with serve() as running:
        local, remote = load_tools(FILE), await tools_of(running.url)
        assert [tool.tool_schema for tool in remote] == [tool.tool_schema for tool in local]
        assert [tool.timeout for tool in remote] == [tool.timeout for tool in local]
        seen = []
        for tools in (local, remote):
            toolbox = Toolbox(tools, tools_kwargs={"count": {"create_kwargs": {"start": 3}}})
            results = [result for call in CALLS for result in await toolbox.execute([call])]
            read = [(r.response.text, tuple(r.response.image), r.reward, r.metrics, r.error) for r in results]
            seen.append((read, await toolbox.rewards()))
            await toolbox.release()
        assert seen[0] == seen[1]
        assert seen[1][1] == {"count": 6.0, "other": 1.0}
        assert running.server.sessions.live == 0
        assert running.server.sessions.stats.opened == 1


async def test_results_keep_the_order_of_the_calls(serve: Any) -> None:  # A15
    async with serve() as running:
        toolbox = Toolbox(await tools_of(running.url))
        calls = [ToolCall(name="block", arguments={"seconds": 0.03}), ToolCall(name="count", arguments={})]
        calls.append(ToolCall(name="wait", arguments={"seconds": 0.001}))
        for _ in range(10):
            assert [text.split("\n")[0][:6] for text in texts(await toolbox.execute(calls)) if text][::2] == [
                "blocke", "waited",
            ]  # fmt: skip
        await toolbox.release()


async def test_faults_in_tools_are_faults_here(serve: Any) -> None:
    async with serve() as running:
        tools = await tools_of(running.url)
        toolbox = Toolbox(tools)
        with pytest.raises(EnvError, match="ZeroDivisionError") as caught:
            await run(toolbox, "fail", how="code")
        assert caught.value.error_type == "ZeroDivisionError"
        assert "served_tools.py" in caught.value.traceback_text
        with pytest.raises(InfraError, match="lost its connection: ConnectionResetError"):
            await run(toolbox, "fail", how="lost")
        assert await run(toolbox, "greet", name="a") == ("Hello a.", False)
        await toolbox.release()
        wrong = Toolbox(tools, tools_kwargs={"greet": {"create_kwargs": {"x": 1}}})
        with pytest.raises(ConfigError, match=r"create_kwargs .* of tool 'greet'"):
            await run(wrong, "greet", name="a")
        await wrong.release()
        assert running.server.sessions.live == 0


async def test_a_creation_that_fails_tells_the_model_and_the_next_call_tries_again(serve: Any) -> None:
    async with serve() as running:
        toolbox = Toolbox(await tools_of(running.url), tools_kwargs={"count": {"create_kwargs": {"start": -1}}})
        for _ in range(2):
            assert await run(toolbox, "count") == ("cannot start below 0", True)
        assert await toolbox.rewards() == {"count": 0.0}
        await toolbox.release()


async def test_64_sessions_keep_their_own_state(serve: Any) -> None:  # D8
    async with serve() as running:
        tools = await tools_of(running.url)

        async def play(i: int) -> list[str]:
            toolbox = Toolbox(tools)
            answers = [(await run(toolbox, "count", by=i))[0] for _ in range(3)]
            answers.append((await run(toolbox, "remember", key="x", value=str(i)))[0])
            await toolbox.release()
            return answers

        played = await asyncio.gather(*[play(i) for i in range(64)])
        assert played == [[f"starts at 0\n{i}", *[str(i * turn) for turn in range(2, 4)], f"x={i}"] for i in range(64)]
        assert (running.server.sessions.live, running.server.sessions.stats.opened) == (0, 64)


async def test_a_call_that_takes_too_long_here_is_stopped_there(serve: Any, module: Any, until: Any) -> None:
    async with serve() as running:
        toolbox = Toolbox(await tools_of(running.url), limits=ToolLimits(call_timeout=0.3))
        text, error = await run(toolbox, "wait", seconds=20, mark="w")
        assert error
        assert "took more than 0.3 s" in text
        await until(lambda: "cancelled w" in module.LOG)
        assert await run(toolbox, "greet", name="a") == ("Hello a.", False)
        await toolbox.release()


async def test_cancelling_a_session_leaves_nothing_on_the_server(serve: Any, module: Any, until: Any) -> None:  # D1
    async with serve() as running:
        tools = await tools_of(running.url)

        async def play(i: int) -> None:
            toolbox = Toolbox(tools)
            try:
                await run(toolbox, "count")
                await run(toolbox, "wait", seconds=20, mark=str(i))
            finally:
                await toolbox.release()

        tasks = [asyncio.create_task(play(i)) for i in range(40)]
        for i, task in enumerate(tasks):
            await asyncio.sleep(0.002 * (i % 5))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: running.server.sessions.live == 0)
        assert module.LOG.count("create count") == module.LOG.count("release count")
        assert tools[0]._server.sessions.live == 0  # type: ignore[attr-defined]


async def test_a_session_is_kept_while_the_model_thinks(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LEASE", 0.3)
    async with serve() as running:
        toolbox = Toolbox(await tools_of(running.url))
        await run(toolbox, "count")
        await asyncio.sleep(1.0)
        assert await run(toolbox, "count") == ("2", False)
        await toolbox.release()


class Proxy:
    """A TCP proxy that can break: it forwards to a server and cuts connections on demand.

    Attributes:
        cut_answers: so many answers are lost after the server has got the request.
    """

    def __init__(self, url: str) -> None:
        self._target = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
        self.cut_answers = 0
        self.requests = 0

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)

        async def forward() -> None:
            while data := await reader.read(65536):
                self.requests += data.count(b"HTTP/1.1\r\n")
                there_writer.write(data)
            there_writer.close()

        forwarding = asyncio.create_task(forward())
        try:
            while data := await there_reader.read(65536):
                if self.cut_answers:
                    self.cut_answers -= 1
                    writer.transport.abort()
                    break
                writer.write(data)
        finally:
            forwarding.cancel()
            await asyncio.wait({forwarding})
            there_writer.close()
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"


async def test_lost_answers_are_asked_for_again_and_nothing_runs_twice(serve: Any, module: Any) -> None:
    async with serve() as running:
        proxy = Proxy(running.url)
        async with proxy.running() as url:
            toolbox = Toolbox(await tools_of(url))
            for turn in range(1, 4):
                proxy.cut_answers = 2
                text, error = await run(toolbox, "count")
                assert (text.removeprefix("starts at 0\n"), error) == (str(turn), False)
            proxy.cut_answers = 1
            assert await toolbox.rewards() == {"count": 3.0}
            proxy.cut_answers = 1
            await toolbox.release()
        assert running.server.sessions.stats.opened == running.server.sessions.stats.closed == 1
        assert running.server.sessions.stats.calls == {("count", "ok"): 3}
        assert module.LOG == ["create count", "release count"]


async def test_a_server_that_stays_away_is_an_infrastructure_failure(serve: Any) -> None:
    async with serve() as running:
        proxy = Proxy(running.url)
        async with proxy.running() as url:
            toolbox = Toolbox(await tools_of(url))
            await run(toolbox, "count")
            proxy.cut_answers = 100
            start = time.monotonic()
            with pytest.raises(InfraError, match=r"is lost: .* \(4 attempts"):
                await run(toolbox, "count")
            assert time.monotonic() - start < 3
            await toolbox.release()


async def test_a_session_that_the_server_does_not_know_any_more_is_an_infrastructure_failure(serve: Any) -> None:
    async with serve() as running:
        toolbox = Toolbox(await tools_of(running.url))
        await run(toolbox, "count")
        await running.server.sessions.aclose()
        with pytest.raises(InfraError, match="it was released, or its lease ended"):
            await run(toolbox, "count")
        await toolbox.release()


async def test_a_full_server_is_waited_for(serve: Any) -> None:
    async with serve(limits={"max_sessions": 2}) as running:
        tools = await tools_of(running.url)

        async def play() -> str:
            toolbox = Toolbox(tools)
            text, _ = await run(toolbox, "wait", seconds=0.05)
            await toolbox.release()
            return text

        assert await asyncio.gather(*[play() for _ in range(6)]) == ["waited"] * 6


async def test_arguments_beyond_the_limit_are_told_to_the_model(serve: Any) -> None:
    async with serve(limits={"max_request_bytes": 4096}) as running:
        toolbox = Toolbox(await tools_of(running.url))
        text, error = await run(toolbox, "greet", name="x" * 5000)
        assert error
        assert "at most 4,096 are accepted" in text
        assert await run(toolbox, "greet", name="x") == ("Hello x.", False)
        await toolbox.release()


async def test_two_toolboxes_of_one_session_id_do_not_share_a_session(serve: Any) -> None:
    async with serve() as running:
        tools = await tools_of(running.url)
        boxes = [Toolbox(tools, context=ToolContext(session_id="same")) for _ in range(2)]
        for box in boxes:
            assert await run(box, "count") == ("starts at 0\n1", False)
        for box in boxes:
            await box.release()
        assert running.server.sessions.stats.opened == 2


async def test_a_selection_of_a_server(serve: Any) -> None:
    async with serve() as running:
        assert [tool.name for tool in await tools_of(running.url, tools=["count", "greet"])] == ["greet", "count"]
        with pytest.raises(ConfigError, match=r"unknown tool 'cuont'\. Did you mean 'count'"):
            await tools_of(running.url, tools=["cuont"])


async def test_no_server_another_server_and_a_wrong_token_are_told_before_anything_starts(serve: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"the tools of {url} cannot be listed: .*is lost"):
            await tools_of(url)
    async with serve() as running:
        with pytest.raises(ConfigError, match="wrong bearer token"):
            await asyncio.to_thread(remote_tools, running.url, token="wrong")
    from agentgym.tools.serving import Address, Service

    app = web.Application()

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app.add_routes([web.get("/tools", hello)])
    async with Service(app, Address()) as service:
        with pytest.raises(ConfigError, match="is it a tool server"):
            await tools_of(service.url)


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        ("ftp://x", {}, "expected http://HOST:PORT"),
        ("127.0.0.1:8000", {}, "expected http://HOST:PORT"),
        ("http://127.0.0.1:8000/v1", {}, "expected http://HOST:PORT"),
        ("process", {}, "no files"),
        ("http://127.0.0.1:1", {"files": ["a.py"]}, "files and sandbox are for 'process'"),
        ("http://127.0.0.1:1", {}, "AGENTGYM_TOOLS_TOKEN"),
        ("process", {"files": ["/nowhere/tools.py"]}, "is not there"),
    ],
)
def test_wrong_addresses_are_named(
    server: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTGYM_TOOLS_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=words):
        remote_tools(server, **options)


# -- a process of our own ----------------------------------------------------------------------------------------------


@pytest.fixture
def process(temp_folder: None) -> Any:
    """The server process of the served tools, ended after the test."""
    found = _process((FILE.resolve(),), "", False, None).locator
    assert isinstance(found, ServerProcess)
    yield found
    found.close()


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_serves_tools_and_starts_again_after_it_was_killed(process: ServerProcess, until: Any) -> None:
    tools = await asyncio.to_thread(remote_tools, "process", files=[FILE])
    assert await asyncio.to_thread(remote_tools, "process", files=[FILE])  # the same process
    toolbox = Toolbox(tools)
    assert await run(toolbox, "count") == ("starts at 0\n1", False)
    first = process.pid
    assert first is not None
    call = asyncio.create_task(run(toolbox, "wait", seconds=20))
    await asyncio.sleep(0.3)
    os.kill(first, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(InfraError, match="is lost"):
        await call
    await toolbox.release()
    assert time.monotonic() - start < 5
    again = Toolbox(tools)
    assert await run(again, "count") == ("starts at 0\n1", False)
    await again.release()
    assert process.pid != first
    assert len(folders()) == 1
    pid = process.pid
    await asyncio.to_thread(process.close)
    assert pid is not None
    assert not alive(pid)
    assert folders() == set()


def test_a_tool_file_with_an_error_is_told_by_the_process(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match="nothing_of_that_name"):
        remote_tools("process", files=[broken])
    assert folders() == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_its_owner_however_that_ends(number: signal.Signals, tmp_path: Path) -> None:  # D4
    import subprocess

    code = (
        "import sys, time\n"
        "from agentgym.tools.server.process import ServerProcess\n"
        "from pathlib import Path\n"
        f"server = ServerProcess([Path({str(FILE)!r})])\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert alive(pid)
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 15
    while (alive(pid) or folders()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not alive(pid)
    assert folders() == set()


def test_folders_of_servers_that_were_killed_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    living = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    starting = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as there:
            gone.bind(str(dead / "socket"))
            there.bind(str(living / "socket"))
            there.listen()
            gone.close()
            remove_stale_folders()
            assert [folder.exists() for folder in (dead, living, starting)] == [False, True, True]
    finally:
        for folder in (dead, living, starting):
            shutil.rmtree(folder, ignore_errors=True)


async def test_in_a_tool_file(tmp_path: Path, process: ServerProcess, serve: Any) -> None:
    (tmp_path / "served.py").symlink_to(FILE)
    file = tmp_path / "tools.yaml"
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with serve() as running:
        file.write_text(
            f"tools:\n"
            f"  - server: {running.url}\n"
            f"    token_file: token\n"
            f"    tools: [count]\n"
            f"  - server: process\n"
            f"    files: [served.py]\n"
            f"    tools: [greet]\n"
            f"  - class_name: agentgym.tools.calculator.calculator\n"
        )
        tools = await asyncio.to_thread(load_tools, file)
        assert [tool.name for tool in tools] == ["count", "greet", "calculator"]
        toolbox = Toolbox(tools)
        results = [(await run(toolbox, "count"))[0], (await run(toolbox, "greet", name="a"))[0]]
        assert results == ["starts at 0\n1", "Hello a."]
        await toolbox.release()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("server: http://127.0.0.1:1\n    token_env: NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is not set"),
        ("server: http://127.0.0.1:1\n    token_file: nowhere", "nowhere' cannot be read"),
        ("server: http://127.0.0.1:1\n    tokenenv: A", "'token_env'"),
        ("server: [1]", "server"),
        ("server: process\n    files: [none.py]", "is not there"),
    ],
)
def test_wrong_entries_say_what_is_wrong(tmp_path: Path, entry: str, words: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_tools(file)
    assert words in str(caught.value)
    assert "tools[0]" in str(caught.value)
