"""The host's side of a worker: `SandboxClient` sends requests over a channel and is what tools see as the sandbox.

Concurrency: one reader task per client consumes the channel, resolves the futures of the requests by id, and ends with
the channel or with `close`; then every request that waits is told that the sandbox is lost. Runs hold a lock, so that
they come one at a time; file requests do not.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.resources
import json
import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentgym.errors import InfraError, ToolError, boundary
from agentgym.resources import finish
from agentgym.sandbox import Channel, FileEntry, Language, RunResult, SandboxConfig, WorkerSettings

logger = logging.getLogger(__name__)

ANSWER_GRACE = 10.0
"""Seconds that the worker gets beyond a call's time limit; one that says nothing by then is lost."""
FILE_TIMEOUT = 30.0
"""Seconds for a request about files."""
MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 30

_FRAME = struct.Struct(">II")

BOOT = """\
import sys, marshal
f = open(0, "rb", 0, closefd=False)
def r(n):
    d = b""
    while len(d) < n:
        p = f.read(n - len(d))
        if not p: sys.exit(1)
        d += p
    return d
k = r(1)
d = r(int.from_bytes(r(4), "big"))
__file__ = "<worker>"
exec(marshal.loads(d) if k == b"m" else compile(d, __file__, "exec"))
main(0, 1)
"""
"""Reads the worker from stdin, ``s`` + length + source or ``m`` + length + code of this interpreter, and runs it."""


def worker_command(python: str = "python3") -> list[str]:
    """What a backend starts inside: the channel at stdin and stdout. Needs Python 3.8 or later, and bash."""
    return [python, "-I", "-S", "-B", "-c", BOOT]


@functools.cache
def worker_source() -> bytes:
    """The worker as one text, as it is sent: its files without what they import of each other."""
    folder = importlib.resources.files("agentgym.tools.sandbox") / "inside"
    texts = ["from __future__ import annotations\n"]
    for name in ("system", "files", "python_session", "interpreters", "worker"):
        text = folder.joinpath(f"{name}.py").read_text(encoding="utf-8")
        text = text.replace("from __future__ import annotations\n", "")
        text = re.sub(r"^(TYPE_CHECKING = .*|if TYPE_CHECKING:\n(    .*\n|\n)+)", "", text, flags=re.MULTILINE)
        texts.append(re.sub(r"^from agentgym\.\S+ import (\([^)]*\)|.*)$", "", text, flags=re.MULTILINE))
    return "\n".join(texts).encode()


_compiled: dict[tuple[str, str | None], bytes] = {}
"""The worker as code of the interpreter behind (backend, image); made by the first worker there, before it runs any
code of a session, and only ever sent back into a sandbox."""


class SandboxClient:
    """A started sandbox; see `agentgym.sandbox.Sandbox`. Made by `start`.

    Args:
        id: unique name, for logs.
        backend: the backend's name.
        channel: to the worker, which has not been sent anything yet.
        config: settings of the sandbox.
    """

    def __init__(self, id: str, backend: str, channel: Channel, config: SandboxConfig) -> None:
        self.id = id
        self.backend = backend
        self.channel = channel
        self.config = config
        self.calls = 0
        """Calls of the session's code that were begun."""
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._number = 0
        self._lost: str | None = None
        self._running = asyncio.Lock()
        self._settling: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """True once the sandbox cannot be used any more."""
        return self._lost is not None or not self.channel.alive

    def ensure_alive(self) -> None:
        """See `agentgym.sandbox.Sandbox.ensure_alive`."""
        if not self.lost:
            return
        if self.calls and self.channel.loss is None:
            raise ToolError("the sandbox was lost, with its files and variables; the next call gets a new one")
        raise self._infra_error()

    async def start(self, settings: WorkerSettings) -> None:
        """Send the worker, wait until it is ready. Raises `InfraError` if it is lost on the way."""
        key = (self.backend, self.config.image)
        program = _compiled.get(key)
        kind, data = (b"s", worker_source()) if program is None else (b"m", program)
        header = json.dumps({**asdict(settings), "output_limit": self.config.output_limit}).encode()
        hello = self._expect(0)
        self._reader = asyncio.create_task(self._read(), name=f"reader of sandbox {self.id}")
        try:
            await self._write(kind + len(data).to_bytes(4, "big") + data + _FRAME.pack(len(header), 0) + header)
            await hello
            if program is None:
                _, _compiled[key] = await self._ask({"op": "compiled"}, worker_source())
        except (_Lost, ConnectionError) as error:
            self._lose(str(error))
            raise self._infra_error() from error

    async def run(self, language: Language, code: str, *, timeout: float) -> RunResult:
        """See `agentgym.sandbox.Sandbox.run`."""
        request = {"op": "run", "language": language, "timeout": timeout}
        return await self._run(request, code.encode("utf-8", "surrogateescape"), timeout)

    async def run_trusted(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> RunResult:
        """See `agentgym.sandbox.Sandbox.run_trusted`."""
        return await self._run({"op": "program", "argv": list(argv), "timeout": timeout}, stdin, timeout)

    async def write_file(self, path: str, data: bytes) -> None:
        """See `agentgym.sandbox.Sandbox.write_file`."""
        await self._ask_files({"op": "write", "path": path}, data)

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """See `agentgym.sandbox.Sandbox.read_file`."""
        return (await self._ask_files({"op": "read", "path": path, "limit": limit}))[1]

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """See `agentgym.sandbox.Sandbox.list_files`."""
        _, data = await self._ask_files({"op": "list", "path": path})
        with boundary("the answer of the sandbox"):
            return [FileEntry(name=_clean(name), kind=kind, size=size) for name, kind, size in json.loads(data)]

    async def close(self) -> None:
        """Destroy the sandbox. Idempotent; a cancellation is raised when it is gone."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close of sandbox {self.id}")
        await finish(self._closing)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _run(self, request: dict[str, Any], data: bytes, timeout: float) -> RunResult:
        await self._running.acquire()
        settling = False
        try:
            if self.lost:
                return self._lost_result("the sandbox was lost before this call, which did not run")
            self.calls += 1
            number, answer = self._register()
            try:
                await self._send({**request, "id": number}, data)
                header, output = await asyncio.wait_for(asyncio.shield(answer), timeout + ANSWER_GRACE)
            except asyncio.CancelledError:
                settling = True
                self._settle(number, answer)
                raise
            except TimeoutError:
                self._lose("the sandbox stopped answering")
                await self.channel.kill()
                return self._lost_result(self._lost or "")
            except (_Lost, ConnectionError):
                return self._lost_result(self._lost or "the sandbox was lost")
            return self._read_result(header, output)
        finally:
            if not settling:
                self._running.release()

    def _settle(self, number: int, answer: asyncio.Future[tuple[dict[str, Any], bytes]]) -> None:
        """After the caller of a run was cancelled: stop the code; the next call waits for that."""

        async def settle() -> None:
            try:
                await self._send({"op": "cancel", "id": -1, "run": number}, b"")
                await asyncio.wait_for(answer, ANSWER_GRACE)
            except (_Lost, ConnectionError):
                pass
            except TimeoutError:
                self._lose("the sandbox stopped answering")
                await self.channel.kill()
            finally:
                self._running.release()

        task = asyncio.create_task(settle(), name=f"cancel a call of sandbox {self.id}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _ask_files(self, request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        self.ensure_alive()
        try:
            return await self._ask(request, data)
        except (_Lost, ConnectionError) as error:
            self._lose(str(error))
            self.ensure_alive()
            raise

    async def _ask(self, request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        number, answer = self._register()
        try:
            await self._send({**request, "id": number}, data)
            header, payload = await asyncio.wait_for(answer, FILE_TIMEOUT)
        except TimeoutError as error:
            self._lose("the sandbox stopped answering")
            raise _Lost(self._lost) from error
        finally:
            self._waiting.pop(number, None)
        if "error" in header:
            raise ToolError(_clean(str(header["error"])))
        return header, payload

    def _register(self) -> tuple[int, asyncio.Future[tuple[dict[str, Any], bytes]]]:
        self._number += 1
        return self._number, self._expect(self._number)

    def _expect(self, number: int) -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting[number] = future
        return future

    async def _send(self, header: dict[str, Any], data: bytes) -> None:
        head = json.dumps(header).encode()
        await self._write(_FRAME.pack(len(head), len(data)) + head + data)

    async def _write(self, data: bytes) -> None:
        if self._lost is not None:
            raise _Lost(self._lost)
        await self.channel.write(data)

    def _read_result(self, header: dict[str, Any], output: bytes) -> RunResult:
        if "error" in header:
            raise ToolError(_clean(str(header["error"])))
        with boundary("the answer of the sandbox"):
            head, dropped = int(header["head"]), int(header["dropped"])
            text = output.decode("utf-8", "replace")
            if dropped > 0:
                first = output[:head].decode("utf-8", "ignore")
                last = output[head:].decode("utf-8", "ignore")
                text = f"{first}\n... [{dropped} bytes left out] ...\n{last}"
            return RunResult(
                output=text,
                status=header["status"],
                output_bytes=int(header["output_bytes"]),
                truncated=dropped > 0,
                state_lost=bool(header["state_lost"]),
                exit_code=header["exit_code"],
                seconds=float(header["seconds"]),
                reason=_clean(str(header["reason"])),
            )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _lost_result(self, reason: str) -> RunResult:
        if self.channel.loss is not None or not self.calls:
            raise self._infra_error()
        return RunResult(output="", status="lost", state_lost=True, reason=reason)

    def _infra_error(self) -> InfraError:
        return InfraError(f"sandbox {self.id} ({self.backend}) was lost: {self.channel.loss or self._lost}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_Lost(reason))
        self._waiting.clear()

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            with boundary(f"the channel of sandbox {self.id}"):
                while data := await self.channel.read():
                    buffer += data
                    self._take_frames(buffer)
            self._lose("the sandbox ended")
        except (_Garbage, InfraError) as error:
            self._lose(str(error))
        except asyncio.CancelledError:
            self._lose("the sandbox was closed")
            raise

    def _take_frames(self, buffer: bytearray) -> None:
        while len(buffer) >= _FRAME.size:
            header_size, payload_size = _FRAME.unpack_from(buffer)
            if header_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
                raise _Garbage(f"the sandbox sent a frame of {header_size} + {payload_size} bytes")
            end = _FRAME.size + header_size + payload_size
            if len(buffer) < end:
                return
            with memoryview(buffer) as view:
                header = bytes(view[_FRAME.size : _FRAME.size + header_size])
                payload = bytes(view[_FRAME.size + header_size : end])
            del buffer[:end]
            try:
                fields = json.loads(header)
                future = self._waiting.pop(fields["id"], None)
            except (ValueError, KeyError, TypeError) as error:
                raise _Garbage(f"the sandbox sent a header that cannot be read: {error}") from error
            if future is not None and not future.done():
                future.set_result((fields, payload))

    async def _close(self) -> None:
        try:
            await self.channel.kill()
        finally:
            self._lose("the sandbox was closed")
            tasks = [*self._settling, *([self._reader] if self._reader is not None else [])]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


class _Lost(InfraError):
    """The sandbox ended while a request waited."""


class _Garbage(InfraError):
    """What came over the channel is no frame."""


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A request whose caller is gone must not complain on its own."""
    if not future.cancelled():
        future.exception()


def _clean(text: str) -> str:
    """Text from the sandbox without lone surrogates, which no encoder takes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if _encodable(text) else ascii(text)


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xDC80 or 0xDCFF < ord(c) <= 0xDFFF for c in text)
