"""A tool server as a child process, reached over a unix socket and ended with its owner.

    python -m agentgym.tools.server.process      started by `ServerProcess`, never by hand

The owner writes one line of JSON (`ChildSettings`) to the child's standard input and keeps that pipe open: when it is
closed, in whatever way the owner ends, the child releases its sessions and ends too. The child answers with one line:
``{"ready": true}``, or ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.sandbox import read_sandbox_config
from agentgym.tool_files import load_tools
from agentgym.tool_threads import run_in_thread
from agentgym.tools.server.app import ToolServer
from agentgym.tools.server.client import Endpoint
from agentgym.tools.serving import Address, Service, listens, until_signal

START_TIMEOUT = 60.0
"""Seconds for the start: a busy machine, and tools that import a lot."""
STOP_TIMEOUT = 10.0
FOLDER_PREFIX = "agentgym-tools-"
STALE_AFTER = 600.0
"""Seconds after which a folder without a socket counts as left behind."""


class ChildSettings(BaseModel):
    """What the child serves."""

    files: list[str]
    socket: str
    token: str
    sandbox: dict[str, Any] | str | None = None


class ServerProcess:
    """Starts the server at its first use, and again when it is found dead. Threads may share it.

    Args:
        files: tool files.
        sandbox: settings of the sandboxes of its sessions; None: none.
    """

    def __init__(self, files: Sequence[Path], *, sandbox: dict[str, Any] | str | None = None) -> None:
        self._name = f"process of {', '.join(map(str, files))}"
        self._files = [str(path.resolve()) for path in files]
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint = Endpoint("", "")
        self._stop: weakref.finalize[..., Any] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def pid(self) -> int | None:
        """Of the child, if one was started."""
        return self._process.pid if self._process is not None else None

    async def locate(self) -> Endpoint:
        """The endpoint of the running server, started if it is not. Raises `ConfigError`, `InfraError`."""
        if self._process is not None and self._process.poll() is None:
            return self._endpoint
        return await run_in_thread(self.start)

    def start(self) -> Endpoint:
        """Start the server unless it runs.

        Raises:
            ConfigError: a tool file that cannot be loaded.
            InfraError: the server does not start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            return self._endpoint

    def close(self) -> None:
        """End the server; its sessions are released. A later use starts it again."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        remove_stale_folders()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        socket, token = folder / "socket", secrets.token_urlsafe(32)
        # A session of its own: Ctrl-C is for the owner, which needs the server for its releases.
        process = subprocess.Popen(
            [sys.executable, "-m", "agentgym.tools.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process, self._endpoint = process, Endpoint(f"unix:{socket}", token)
        self._stop = weakref.finalize(self, _stop, process, folder)
        settings = ChildSettings(files=self._files, socket=str(socket), token=token, sandbox=self._sandbox)
        try:
            answer = _ask(process, settings.model_dump_json())
        except BaseException:
            self._end()
            raise
        if "error" in answer:
            self._end()
            raise ConfigError(f"{self.name}: {answer['error']}")

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None


def _ask(process: subprocess.Popen[bytes], line: str) -> dict[str, Any]:
    """Send the settings and wait for the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
        answer = process.stdout.readline() if ready else b""
    except OSError:
        answer = b""
    if not answer:
        how = f"exit code {process.poll()}" if process.poll() is not None else f"no answer in {START_TIMEOUT:g} s"
        raise InfraError(f"a tool server did not start ({how}); its output is on standard error")
    value: dict[str, Any] = json.loads(answer)
    return value


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Close the child's standard input, which ends it, and wait for that."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale_folders() -> None:
    """Remove the folders of servers that were killed together with their owners: nobody listens there any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            socket = folder / "socket"
            dead = not listens(socket) if socket.exists() else time.time() - folder.stat().st_mtime > STALE_AFTER
        except OSError:
            continue  # removed by its owner meanwhile
        if dead:
            shutil.rmtree(folder, ignore_errors=True)


# -- in the child ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Serve until the owner closes standard input, or SIGTERM."""
    # Tools get an empty standard input and write to standard error: both channels belong to the owner.
    channel, answers = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    commands = os.fdopen(channel, "rb", buffering=0)
    line = commands.readline()
    if not line:
        return 1
    settings = ChildSettings.model_validate_json(line)
    folder = Path(settings.socket).parent
    try:
        tools = load_tools(*settings.files)
        server = ToolServer(tools, token=settings.token, sandbox=read_sandbox_config(settings.sandbox))
        asyncio.run(_serve(server, Path(settings.socket), commands, answers))
    except AgentGymError as error:
        _answer(answers, {"error": str(error)})
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _serve(server: ToolServer, socket: Path, commands: Any, answers: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
    owner = asyncio.ensure_future(reader.read())
    try:
        async with Service(server.app, Address(unix=socket)):
            _answer(answers, {"ready": True})
            await until_signal(owner)
    finally:
        owner.cancel()
        transport.close()


def _answer(answers: Any, value: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(value) + "\n")
        answers.close()
    except OSError:
        return  # the owner is gone, which the other channel says too


if __name__ == "__main__":
    sys.exit(main())
