"""What a session holds, released in reverse order, each exactly once, whatever fails on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from agentgym.errors import AgentGymError, SessionClosed, boundary
from agentgym.ids import new_id

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_GRACE = 0.5
"""Seconds that a release which ran out of time gets to unwind after it was cancelled."""


LEAST_SHARE = 0.1
"""Seconds that every release gets, also when those before it have used up all the time."""


class Entry(NamedTuple):
    """One thing to release, and its name for the log."""

    name: str
    release: Callable[[], Awaitable[object]]


@dataclass(slots=True)
class ReleaseReport:
    """What a release could not do."""

    errors: int = 0
    """Releases that raised, were cancelled from outside or ran out of time."""
    quarantined: int = 0
    """Releases that did not even end when cancelled: they may still run and are never waited for again."""
    interrupted: asyncio.CancelledError | None = None
    """The first cancellation of the releasing task, put off until everything was attempted."""


class Resources:
    """A stack of things to release: tools, sandboxes, whatever an episode opened.

    Example:
        >>> resources = Resources()
        >>> sandbox = await resources.acquire("sandbox", start_sandbox, stop_sandbox)
        >>> resources.push("tools", toolbox.release)
        >>> await resources.release()  # tools, then the sandbox
    """

    def __init__(self) -> None:
        self.owner = new_id()
        """Id of the session that holds the resources; a random one outside of a session."""
        self._entries: list[Entry] = []
        self._closed = False

    def push(self, name: str, release: Callable[[], Awaitable[object]]) -> None:
        """Have ``release`` awaited at the end, before everything that was pushed earlier.

        Raises:
            SessionClosed: the session is already being released; the caller has to release what it holds.
        """
        if self._closed:
            raise SessionClosed(f"session {self.owner} is being released and takes no new resource ({name})")
        self._entries.append(Entry(name, release))

    async def acquire(
        self, name: str, create: Callable[[], Awaitable[T]], release: Callable[[T], Awaitable[object]]
    ) -> T:
        """Create something that has to be released; nothing is left behind if the caller is cancelled meanwhile.

        ``create`` runs in a task of its own. Cancelling the caller does not touch it: the release of the session
        cancels it, waits for its end, and releases what it made all the same. A ``create`` that raises made nothing.
        """
        if self._closed:
            raise SessionClosed(f"session {self.owner} is being released and takes no new resource ({name})")
        creation: asyncio.Future[T] = asyncio.ensure_future(create())

        async def release_created() -> None:
            creation.cancel()
            await asyncio.wait({creation})
            if not creation.cancelled() and creation.exception() is None:
                await release(creation.result())

        self.push(name, release_created)
        return await asyncio.shield(creation)

    def drain(self, *, close: bool = False) -> list[Entry]:
        """Take out all entries in the order of their release. ``close``: refuse new ones from now on."""
        entries = self._entries[::-1]
        self._entries.clear()
        self._closed = self._closed or close
        return entries

    async def release(self, timeout: float | None = None) -> ReleaseReport:
        """Release everything that is held now (see `release_all`); a cancellation meanwhile is raised at the end."""
        report = await release_all(self.drain(), owner=self.owner, timeout=timeout)
        if report.interrupted is not None:
            raise report.interrupted
        return report


async def release_all(entries: Sequence[Entry], *, owner: str, timeout: float | None) -> ReleaseReport:
    """Await every release in order. One that fails or hangs is logged with the owner and does not stop the others.

    Args:
        entries: what to release, first to last.
        owner: session id, for the log.
        timeout: seconds for all of them. Each may use an equal share of what is left, so that one that hangs leaves
            time for those behind it. None: no limit.
    """
    report = ReleaseReport()
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    for i, entry in enumerate(entries):
        share = None if deadline is None else max(LEAST_SHARE, (deadline - loop.time()) / (len(entries) - i))
        await _release_one(entry, owner, share, report)
    return report


async def _release_one(entry: Entry, owner: str, timeout: float | None, report: ReleaseReport) -> None:
    # A task of its own: cancelling the releasing task cannot interrupt it, and one that ignores its cancellation
    # can be left behind.
    task = asyncio.create_task(_attempt(entry), name=f"release {entry.name} of session {owner}")
    report.interrupted = await outlast(task, timeout) or report.interrupted
    if not task.done():
        logger.error("session %s: releasing %s took more than %.3g s, cancelled", owner, entry.name, timeout)
        task.cancel()
        report.interrupted = await outlast(task, CANCEL_GRACE) or report.interrupted
        report.errors += 1
        if not task.done():
            logger.error("session %s: releasing %s ignores its cancellation, left behind", owner, entry.name)
            report.quarantined += 1
    elif task.cancelled():
        logger.error("session %s: releasing %s was cancelled", owner, entry.name)
        report.errors += 1
    elif (error := task.result()) is not None:
        logger.error("session %s: releasing %s failed: %s", owner, entry.name, error, exc_info=error)
        report.errors += 1


async def _attempt(entry: Entry) -> AgentGymError | None:
    """The error of the release, if any: returned, so that a task that was left behind never complains on its own."""
    try:
        with boundary(f"release of {entry.name}"):
            await entry.release()
    except AgentGymError as error:
        return error
    return None


async def outlast(task: asyncio.Future[Any], timeout: float | None = None) -> asyncio.CancelledError | None:
    """Wait until ``task`` is done or ``timeout`` seconds are over, however often the caller is cancelled meanwhile.

    Returns:
        The first cancellation that was put off; the caller raises it when its own work is done.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            interrupted = interrupted or error
    return interrupted


async def finish(task: asyncio.Future[T]) -> T:
    """Wait until ``task`` is done, however often the caller is cancelled meanwhile.

    Returns the result of the task, or raises its error; a cancellation of the caller goes before both.
    """
    interrupted = await outlast(task)
    failure = None if task.cancelled() else task.exception()  # looked at in any case: nobody else may
    if interrupted is not None:
        raise interrupted from failure
    return task.result()
