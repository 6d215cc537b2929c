"""A tool server as a child process, reached over a unix socket and ended with its owner.

The owner writes one line of JSON (`ChildSettings`) to the child's standard input and keeps that pipe open: when it is
closed, in whatever way the owner ends, the child releases its sessions and ends too. The child answers with one line:
``{"ready": true}``, or ``{"error": "..."}``.
"""

from __future__ import annotations

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

from agentgym.errors import ConfigError, InfraError
from agentgym.tool_threads import run_in_thread
from agentgym.tools.server.client import Endpoint
from agentgym.tools.server.container import FOLDER, container_command
from agentgym.tools.serving import listens

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
        container: run it in a Docker container without a network.
        image: of the container; None: see `agentgym.tools.server.container`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        sandbox: dict[str, Any] | str | None = None,
        container: bool = False,
        image: str | None = None,
    ) -> None:
        self._name = f"{'container' if container else 'process'} of {', '.join(map(str, files))}"
        self._container = container
        self._image = image
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
        command, inside = [sys.executable, "-m", "agentgym.tools.server.child"], str(socket)
        if self._container:
            try:
                command = container_command(folder, self._files, image=self._image)
            except ConfigError:
                shutil.rmtree(folder)
                raise
            inside = f"{FOLDER}/socket"
        # A session of its own: Ctrl-C is for the owner, which needs the server for its releases.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process, self._endpoint = process, Endpoint(f"unix:{socket}", token)
        self._stop = weakref.finalize(self, _stop, process, folder)
        settings = ChildSettings(files=self._files, socket=inside, token=token, sandbox=self._sandbox)
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
