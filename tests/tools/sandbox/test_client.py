"""The host's side of a worker: what it sends, and what it makes of a worker that lies or falls silent."""

from __future__ import annotations

import ast
import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

from agentgym.errors import InfraError, ToolError
from agentgym.sandbox import SandboxConfig, WorkerSettings
from agentgym.tools.sandbox import client
from agentgym.tools.sandbox.client import SandboxClient, worker_source

LIMIT = 300


def test_the_worker_is_one_text_for_python_3_8_that_imports_the_standard_library_only() -> None:
    tree = ast.parse(worker_source(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert b"agentgym.tools" not in worker_source().replace(b"`agentgym.tools.sandbox.client.worker_source`", b"")


def test_the_worker_ends_when_its_channel_is_closed() -> None:
    done = subprocess.run(client.worker_command(sys.executable), stdin=subprocess.DEVNULL, timeout=20, check=False)
    assert done.returncode == 1


def frame(header: object, payload: bytes = b"") -> bytes:
    data = json.dumps(header).encode()
    return struct.pack(">II", len(data), len(payload)) + data + payload


class Scripted:
    """A channel whose worker answers as a function says; ``None`` ends the stream."""

    def __init__(self, answer: Callable[[dict[str, object]], bytes | None]) -> None:
        self.loss: InfraError | None = None
        self.alive = True
        self.killed = 0
        self._answer = answer
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._started = False

    async def read(self) -> bytes:
        data = await self._out.get()
        self.alive = self.alive and bool(data)
        return data

    async def write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            self._out.put_nowait(frame({"id": 0}))
            return
        size, _ = struct.unpack_from(">II", data)
        header = json.loads(data[8 : 8 + size])
        if header["op"] == "compiled":
            self._out.put_nowait(frame({"id": header["id"]}))
            return
        answer = self._answer(header)
        if answer is None:
            self._out.put_nowait(b"")
        elif answer:
            self._out.put_nowait(answer)

    async def kill(self) -> None:
        self.killed += 1
        self._out.put_nowait(b"")


async def started(answer: Callable[[dict[str, object]], bytes | None]) -> tuple[SandboxClient, Scripted]:
    channel = Scripted(answer)
    sandbox = SandboxClient("toy", "toy", channel, SandboxConfig(output_limit=LIMIT))
    await sandbox.start(WorkerSettings())
    return sandbox, channel


@pytest.mark.parametrize(
    "answer",
    [
        b"x" * 100,
        struct.pack(">II", 2**31, 0),
        frame(["no", "mapping"]),
        frame({"no": "id"}),
        struct.pack(">II", 3, 0) + b"{{{",
    ],
)
async def test_garbage_on_the_channel_loses_the_sandbox_and_nothing_else(answer: bytes) -> None:
    sandbox, channel = await started(lambda _: answer)
    result = await sandbox.run("python", "1", timeout=5)
    assert (result.status, result.state_lost, result.output) == ("lost", True, "")
    assert sandbox.lost
    await sandbox.close()
    assert channel.killed == 1


async def test_answers_to_nothing_are_ignored() -> None:
    fields = {"status": "ok", "exit_code": None, "state_lost": False, "reason": "", "output_bytes": 1}
    fields |= {"head": 1, "dropped": 0, "seconds": 0.1}

    def answer(header: dict[str, object]) -> bytes:
        return frame({**fields, "id": 999}, b"forged") + frame({**fields, "id": header["id"]}, b"1")

    sandbox, _ = await started(answer)
    assert (await sandbox.run("python", "1", timeout=5)).output == "1"
    assert (await sandbox.run("python", "1", timeout=5)).output == "1"
    await sandbox.close()


async def test_a_worker_that_falls_silent_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_GRACE", 0.1)
    sandbox, channel = await started(lambda _: b"")
    result = await asyncio.wait_for(sandbox.run("python", "1", timeout=0.1), 2)
    assert (result.status, result.reason) == ("lost", "the sandbox stopped answering")
    assert channel.killed == 1
    with pytest.raises(ToolError, match="was lost"):
        await sandbox.read_file("x", limit=1)
    await sandbox.close()


async def test_a_loss_that_the_host_explains_is_no_fault_of_the_code() -> None:
    sandbox, channel = await started(lambda _: None)
    channel.loss = InfraError("the daemon is gone")
    with pytest.raises(InfraError, match="the daemon is gone"):
        await sandbox.run("python", "1", timeout=5)
    with pytest.raises(InfraError, match="the daemon is gone"):
        await sandbox.list_files()
    await sandbox.close()


async def test_a_loss_before_any_code_ran_is_no_fault_of_the_code() -> None:
    sandbox, _ = await started(lambda _: None)
    with pytest.raises(InfraError):
        await sandbox.list_files()
    with pytest.raises(InfraError):
        await sandbox.run("python", "1", timeout=5)
    await sandbox.close()


async def test_concurrent_closes_kill_once() -> None:
    sandbox, channel = await started(lambda _: b"")
    await asyncio.gather(*(sandbox.close() for _ in range(5)))
    await sandbox.close()
    assert channel.killed == 1
