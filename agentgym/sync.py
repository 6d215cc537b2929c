"""Threads between the two sides of an environment: sync code under an async caller, async code under a sync caller.

* `SyncThread` runs blocking code of one session, always on the same thread, one call after the other. Producers: any
  thread or event loop; consumer: the one worker thread. A call that its caller gave up (timeout, cancellation) is
  skipped if it has not begun and runs to its end otherwise; later calls wait behind it.
* `LoopThread` runs coroutines of one environment on an event loop of its own, for callers that have none.

Both threads are daemons: code that never returns cannot keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from agentgym.errors import SessionClosed, SessionError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

Job = Callable[[], None]
_numbers = itertools.count()
_quarantined_total = 0
_quarantine_lock = threading.Lock()


def quarantined() -> int:
    """How many threads of this process were given up since its start, because a call did not return in time."""
    return _quarantined_total


class SyncThread:
    """One dedicated thread for the blocking code of one session; it starts at the first call.

    Args:
        name: shown in thread dumps and in warnings.
    """

    def __init__(self, name: str = "agentgym-sync") -> None:
        self.name = f"{name}-{next(_numbers)}"
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        # A forgotten environment must not leave its thread behind.
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._finalizer.atexit = False

    @property
    def current(self) -> bool:
        """True if the caller is running on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call, in a copy of the caller's context variables. Raises `SessionClosed` after `close`."""
        context = contextvars.copy_context()
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(fn, *args, **kwargs)
            except StopIteration as error:
                # Futures refuse StopIteration: the waiting task would hang.
                stop = RuntimeError(f"{fn!r} raised StopIteration")
                stop.__cause__ = error
                future.set_exception(stop)
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise SessionClosed(f"thread {self.name!r} is closed; make a new environment")
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self.name, daemon=True)
                self._thread.start()
            self._jobs.put(job)
        return future

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a call on the thread. Cancelling gives up waiting; a call that has begun still runs to its end."""
        return await asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Block until the call is done; runs it directly if the caller already is on the thread."""
        if self.current:
            return fn(*args, **kwargs)
        return self.submit(fn, *args, **kwargs).result()

    def wait(self, future: Future[T]) -> T:
        """Wait, on this thread, for a result that may itself need this thread: queued calls run meanwhile.

        Async code that a blocking call waits for can so use the thread without waiting for itself.
        """
        stop = False
        future.add_done_callback(lambda _: self._jobs.put(_nothing))
        while not future.done():
            job = self._jobs.get()
            if job is None:
                stop = True
            else:
                job()
        if stop:
            self._jobs.put(None)
        return future.result()

    def close(self, timeout: float = 0.0) -> bool:
        """Take no more calls and wait up to ``timeout`` seconds for those that were accepted. Idempotent.

        Returns:
            True if the thread has ended. False if it is still inside a call: it is quarantined (left alone, counted by
            `quarantined`) and ends by itself should the call ever return.
        """
        with self._lock:
            first = not self._closed
            self._closed = True
            thread = self._thread
        if first:
            self._finalizer()
        if thread is None or self.current:
            return True
        thread.join(timeout)
        if not thread.is_alive():
            return True
        if first:
            _quarantine(self.name, timeout)
        return False

    async def aclose(self, timeout: float = 0.0) -> bool:
        """`close` without blocking the event loop. If it is cancelled, the thread is quarantined at once."""
        with self._lock:
            thread, accepted = self._thread, not self._closed
        if thread is None or not accepted:
            return self.close()
        idle = False
        try:
            async with asyncio.timeout(timeout):
                await self.run(_nothing)  # it runs after everything that was accepted
            idle = True
        except TimeoutError:
            pass
        finally:
            ended = self.close(1.0 if idle else 0.0)  # an idle thread ends at once; a stuck one is not waited for
        return ended


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    """The worker; it holds no reference to its `SyncThread`, or that could never be collected."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _nothing() -> None:
    pass


def _quarantine(name: str, timeout: float) -> None:
    global _quarantined_total
    with _quarantine_lock:
        _quarantined_total += 1
    logger.warning("thread %s is still inside a call %.1f s after close; it is left alone", name, timeout)


class LoopThread:
    """An event loop on a thread of its own, for sync callers of async code. It starts at once.

    Args:
        name: shown in thread dumps.
    """

    def __init__(self, name: str = "agentgym-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_loop_forever, args=(self.loop,), name=f"{name}-{next(_numbers)}", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        self._finalizer.atexit = False

    def close(self, timeout: float = 10.0) -> bool:
        """Cancel what still runs, stop the loop and wait up to ``timeout`` seconds for its thread. Idempotent.

        Returns:
            True if the thread has ended. False if it is still inside blocking code: it is quarantined.
        """
        if threading.current_thread() is self._thread:
            raise SessionError("an event loop cannot be closed from code that runs on it; close it from its caller")
        if not self._finalizer.alive:
            return not self._thread.is_alive()
        self._finalizer.detach()
        asyncio.run_coroutine_threadsafe(_wind_down(), self.loop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _quarantine(self._thread.name, timeout)
            return False
        return True


def _loop_forever(loop: asyncio.AbstractEventLoop) -> None:
    """The thread of a `LoopThread`; it holds no reference to it, or that could never be collected."""
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _wind_down() -> None:
    """Cancel every other task of the running loop and wait for them; close its async generators."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await asyncio.sleep(0)  # lets the callbacks of tasks that ended just now tell their waiters
    loop.stop()


def block_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], thread: SyncThread | None = None) -> T:
    """Run the coroutine on ``loop`` (which runs in another thread) and wait; interrupting the wait cancels it.

    Args:
        thread: a `SyncThread` that the coroutine may use; if the caller runs on it, it serves the coroutine meanwhile.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return thread.wait(future) if thread is not None and thread.current else future.result()
    except BaseException:
        future.cancel()
        raise
