"""Requests on one side, weight updates on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class UpdateLock:
    """Many requests at a time, or one update.

    An update waits for the requests inside to end and holds later ones back, so each request meets exactly one version
    of the weights. Updates come before requests that wait. For one event loop.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside = 0
        self._updates = asyncio.Lock()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait while an update is on or due; no update happens inside the block."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Wait for the requests inside; no request begins inside the block."""
        async with self._updates:
            self._open.clear()
            try:
                await self._idle.wait()
                yield
            finally:
                self._open.set()
