"""`LocalChannel`: a worker that is a process of this machine, over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentgym.errors import InfraError
from agentgym.sandbox_labels import ENVIRONMENT_KEY
from agentgym.tool_threads import run_in_thread
from agentgym.tools.sandbox.reaper import kill_processes

LIMIT = 1 << 18
"""Bytes that are read ahead."""
EXIT_GRACE = 1.0
"""Seconds that a worker gets to end its children after its channel was closed, where only it can do that."""


class LocalChannel:
    """See `agentgym.sandbox.Channel`. Made by `start`.

    Killing it kills the process and, where there is one, the init process of its pid namespace, and with that all of
    the namespace; `kill` returns when the kernel has done so.
    """

    def __init__(self, process: subprocess.Popen[bytes], stderr: int, clean: Callable[[], Awaitable[None]]) -> None:
        self.loss: InfraError | None = None
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._init_pidfd: int | None = None
        self._stderr = stderr
        self._clean = clean
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._started = False
        self._ended = False
        self._gentle = False
        self._word = ""
        self._killing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str = "/",
        pass_fds: Sequence[int] = (),
        info: int | None = None,
        gentle: bool = False,
        clean: Callable[[], Awaitable[None]],
    ) -> LocalChannel:
        """Start the process; nothing of it is left if this raises or is cancelled.

        Args:
            argv: the command; the worker's channel is its stdin and stdout.
            environment: all of its environment; the labels are in it.
            folder: working directory.
            pass_fds: descriptors that the process inherits.
            info: descriptor on which bubblewrap tells the pid of the sandbox's init process; it is closed here.
            gentle: on `kill`, let the worker end its children first.
            clean: awaited once when everything is dead.
        """
        ours, theirs = socket.socketpair()
        stderr, error = os.pipe()
        try:
            process = _spawn(argv, theirs.fileno(), error, environment, folder, pass_fds)
        except OSError as failure:
            ours.close()
            os.close(stderr)
            await clean()
            raise InfraError(f"cannot start {argv[0]}: {failure}") from failure
        finally:
            theirs.close()
            os.close(error)
        channel = cls(process, stderr, clean)
        channel._gentle = gentle
        channel._word = environment[ENVIRONMENT_KEY]
        try:
            channel._reader, channel._writer = await asyncio.open_connection(sock=ours, limit=LIMIT)
            if info is not None:
                await channel._find_init(info)
        except BaseException:
            await channel.kill()
            raise
        return channel

    @property
    def pid(self) -> int:
        """Of the outermost process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the stream has ended or `kill` was called."""
        return not self._ended and self._killing is None

    async def read(self) -> bytes:
        """See `agentgym.sandbox.Channel.read`."""
        try:
            data = await self._reader.read(LIMIT)
        except ConnectionError:
            data = b""
        if data:
            self._started = True
        else:
            self._ended = True
            if not self._started:
                self.loss = InfraError(f"the worker did not start: {self._complaint() or 'no message'}")
        return data

    async def write(self, data: bytes) -> None:
        """See `agentgym.sandbox.Channel.write`."""
        self._writer.write(data)
        await self._writer.drain()

    async def kill(self) -> None:
        """See `agentgym.sandbox.Channel.kill`; a cancellation does not interrupt it."""
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill(), name="kill a sandbox")
        await asyncio.shield(self._killing)

    async def _find_init(self, info: int) -> None:
        """Wait until bubblewrap has made the sandbox's first process, and hold that."""
        data = b""
        try:
            while not data.rstrip().endswith(b"}"):
                await readable(info)
                part = os.read(info, 4096)
                if not part:
                    raise InfraError(f"bubblewrap made no sandbox: {await self._last_words()}")
                data += part
        finally:
            os.close(info)
        pid = int(data.partition(b'"child-pid":')[2].strip(b" \n}").split(b",")[0])
        with contextlib.suppress(ProcessLookupError):
            self._init_pidfd = os.pidfd_open(pid)

    async def _last_words(self) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(readable(self._pidfd), EXIT_GRACE)
        return self._complaint() or "no message"

    def _complaint(self) -> str:
        os.set_blocking(self._stderr, False)
        try:
            return os.read(self._stderr, 4096).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    async def _kill(self) -> None:
        try:
            if hasattr(self, "_writer"):
                self._writer.close()
            if self._gentle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(readable(self._pidfd), EXIT_GRACE)
            for pidfd in (self._init_pidfd, self._pidfd):
                if pidfd is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            for pidfd in (self._init_pidfd, self._pidfd):
                if pidfd is not None:
                    await readable(pidfd)
            self._process.wait()
            if self._init_pidfd is None:
                # Without a pid namespace processes leave the family. And bubblewrap that is killed before it has told
                # of the init process leaves one behind that waits for it without end.
                await run_in_thread(kill_processes, lambda labels: labels.word == self._word)
        finally:
            self._ended = True
            for descriptor in (self._init_pidfd, self._pidfd, self._stderr):
                if descriptor is not None:
                    os.close(descriptor)
            await self._clean()


def _spawn(
    argv: Sequence[str], stream: int, stderr: int, environment: Mapping[str, str], folder: str, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the process: a millisecond. Not on a thread, with whose end the process would die.

    Without ``preexec_fn`` and ``user=``: only so the child is made by vfork, which does not copy the page tables of a
    large trainer.
    """
    return subprocess.Popen(
        argv, stdin=stream, stdout=stream, stderr=stderr, env=environment, cwd=folder, pass_fds=pass_fds
    )


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read: a pidfd, until its process has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def nothing() -> None:
    """Where there is nothing to clean."""
