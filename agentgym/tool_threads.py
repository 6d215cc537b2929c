"""Threads for the blocking code of tools, shared by all sessions of the process.

Producers: the event loops of the process; consumers: daemon threads that start on demand, so that no session waits
behind another's call until `MAX_THREADS` calls are running at once. A call that its caller gave up (timeout,
cancellation) is skipped if it has not begun; otherwise its thread is quarantined: left alone, counted, and not held
against the limit. It serves again should the call ever return. Daemon threads cannot keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_THREADS = 1024
"""Calls that run at the same time; more wait for their turn. Idle threads cost about 50 kB each."""


class _Job:
    """One call. ``state`` moves from waiting to running to done, or to given up; guarded by the pool's lock."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()
        self.running = False
        self.given_up = False

    def deliver(self, value: Any, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result((value, error))


class ToolThreads:
    """A pool of daemon threads; see the module's text. Safe to use from several event loops."""

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting = 0
        self._idle = 0
        self._threads = 0
        self._stuck = 0
        self._stuck_total = 0
        self._numbers = itertools.count()

    @property
    def quarantined(self) -> int:
        """Threads that are inside a call which its caller gave up."""
        return self._stuck

    @property
    def quarantined_total(self) -> int:
        """Calls that were given up while they ran, since the start."""
        return self._stuck_total

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await ``fn(*args, **kwargs)`` on a thread, with the caller's context variables.

        Cancelling returns at once; a call that has begun runs on, quarantined.
        """
        job = _Job(lambda: fn(*args, **kwargs))
        with self._lock:
            self._waiting += 1
            self._jobs.put(job)
            self._start_if_needed()
        try:
            value, error = await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise
        if error is not None:
            raise error
        result: T = value
        return result

    def _start_if_needed(self) -> None:
        """With the lock held: one more thread if the idle ones do not suffice."""
        if self._waiting > self._idle and self._threads - self._stuck < self._limit:
            self._threads += 1
            name = f"agentgym-tool-{next(self._numbers)}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            job.given_up = True
            if job.running:
                self._stuck += 1
                self._stuck_total += 1
                self._start_if_needed()

    def _work(self) -> None:
        with self._lock:
            self._idle += 1
        while True:
            job = self._jobs.get()
            if not self._begin(job):
                continue
            value, error = _outcome(job)
            if self._end(job):
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    job.loop.call_soon_threadsafe(job.deliver, value, error)
            del job, value, error  # an idle thread keeps nothing alive

    def _begin(self, job: _Job) -> bool:
        """False if nobody waits for the call any more."""
        with self._lock:
            self._waiting -= 1
            if job.given_up:
                return False
            self._idle -= 1
            job.running = True
            return True

    def _end(self, job: _Job) -> bool:
        """False if nobody waits for the result any more."""
        with self._lock:
            job.running = False
            self._idle += 1
            if job.given_up:
                self._stuck -= 1
            return not job.given_up


def _outcome(job: _Job) -> tuple[Any, BaseException | None]:
    """Value or error of the call, whatever the error is: it belongs to the caller, not to this thread."""
    try:
        return job.context.run(job.call), None
    except BaseException as error:  # noqa: BLE001 - handed to the caller
        return None, error


_threads = ToolThreads()


async def run_in_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await blocking code of a tool on one of the shared threads; context variables of the caller reach it.

    Example:
        ``rows = await run_in_thread(connection.execute, query)`` inside of an ``async def execute``.
    """
    return await _threads.run(fn, *args, **kwargs)


def quarantined() -> int:
    """How many tool calls of this process were given up while their thread was still running, since its start."""
    return _threads.quarantined_total
