"""The attached stream of a container: the daemon puts a header before each piece of its stdout and stderr."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

logger = logging.getLogger(__name__)

_HEADER = 8
"""Bytes: stream (1 = stdout, 2 = stderr), three zeros, size in big-endian order."""

_STDOUT = 1
_HIGH_WATER = 1 << 20
"""Bytes that wait to be read before the daemon is made to wait."""

_LOG_LIMIT = 4096


class DockerStream(asyncio.Protocol):
    """Takes the pieces apart. stdout is what the worker says; stderr, where it writes if it fails, goes to the log."""

    def __init__(self) -> None:
        self.ended = False
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._logged = 0

    async def read(self) -> bytes:
        """The next piece of stdout; empty once the stream has ended. For one reader at a time."""
        while not self._pieces:
            if self.ended:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        piece = self._pieces.popleft()
        self._waiting_bytes -= len(piece)
        if self._paused and self._waiting_bytes < _HIGH_WATER // 2 and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    async def write(self, data: bytes) -> None:
        """Send to stdin; waits while more than a buffer's worth is on its way. Raises `ConnectionError` at the end."""
        if self.ended or self._transport is None:
            raise ConnectionResetError("the container's stream has ended")
        self._transport.write(data)
        await self._writable.wait()
        if self.ended:
            raise ConnectionResetError("the container's stream ended while bytes were sent to it")

    def close(self) -> None:
        """End the stream at once; what was not read is dropped."""
        self.ended = True
        self._pieces.clear()
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # -- called by the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        start = 0
        while len(rest) - start >= _HEADER:
            end = start + _HEADER + int.from_bytes(rest[start + 4 : start + _HEADER], "big")
            if len(rest) < end:
                break
            self._take(rest[start], bytes(rest[start + _HEADER : end]))
            start = end
        del rest[:start]
        if self._waiting_bytes >= _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _take(self, stream: int, piece: bytes) -> None:
        if not piece:
            return
        if stream == _STDOUT:
            self._pieces.append(piece)
            self._waiting_bytes += len(piece)
            self._wake_reader()
        elif self._logged < _LOG_LIMIT:
            self._logged += len(piece)
            logger.warning(
                "a sandbox's worker wrote to stderr: %s", piece[:_LOG_LIMIT].decode(errors="replace").strip()
            )

    def _wake(self) -> None:
        self._writable.set()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
