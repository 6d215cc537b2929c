"""One thing per session that several tools use together: a connection, a session on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agentgym.tool import ToolContext


class Held(Protocol):
    """What can be shared."""

    async def open(self) -> None:
        """Make it usable. May be cancelled."""

    async def close(self) -> None:
        """Give everything back; also after an `open` that failed or was cancelled."""


H = TypeVar("H", bound=Held)


@dataclass(slots=True)
class _Share(Generic[H]):
    held: H
    state: dict[str, Any]
    """The session's state, kept alive so that its identity stays unique."""
    opening: asyncio.Task[None] = field(init=False)
    users: int = 0

    @property
    def broken(self) -> bool:
        return self.opening.done() and (self.opening.cancelled() or self.opening.exception() is not None)


class PerSession(Generic[H]):
    """Opens one thing for the first tool of a session that needs it, and closes it after the last has been released.

    Sessions are told apart by `ToolContext.state`, of which each has its own.

    Args:
        make: gives the thing for a session, not opened.
    """

    def __init__(self, make: Callable[[ToolContext], H]) -> None:
        self._make = make
        self._shares: dict[int, _Share[H]] = {}

    @property
    def live(self) -> int:
        """Things that are open."""
        return len(self._shares)

    async def join(self, context: ToolContext) -> H:
        """The session's thing, opened; every `join` that returns needs one `leave`. Raises what `Held.open` raised."""
        key = id(context.state)
        share = self._shares.get(key)
        if share is None or share.broken:
            share = _Share(self._make(context), context.state)
            share.opening = asyncio.create_task(share.held.open(), name=f"opening for session {context.session_id}")
            self._shares[key] = share
        share.users += 1
        try:
            await asyncio.shield(share.opening)
        except BaseException:
            await self._leave(key, share)
            raise
        return share.held

    async def leave(self, context: ToolContext) -> None:
        """One tool less uses it; the last one closes it."""
        key = id(context.state)
        await self._leave(key, self._shares[key])

    async def _leave(self, key: int, share: _Share[H]) -> None:
        share.users -= 1
        if share.users:
            return
        if self._shares.get(key) is share:
            del self._shares[key]
        share.opening.cancel()
        try:
            await asyncio.wait({share.opening})
            if not share.opening.cancelled():
                share.opening.exception()  # the joiners were told
        finally:
            await share.held.close()
