"""Requests at a limited rate."""

from __future__ import annotations

import asyncio


class Pace:
    """At most so many starts a second, evenly spaced. For one event loop.

    Args:
        per_second: None: no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._spacing = 0.0 if per_second is None else 1.0 / per_second
        self._next = 0.0

    async def wait(self) -> None:
        """Return when the next request may start."""
        clock = asyncio.get_running_loop().time
        turn = max(clock(), self._next)
        self._next = turn + self._spacing
        if (wait := turn - clock()) > 0:
            await asyncio.sleep(wait)

    def pause(self, seconds: float) -> None:
        """Let no request start for so long."""
        self._next = max(self._next, asyncio.get_running_loop().time() + seconds)
