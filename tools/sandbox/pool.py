"""`SandboxPool`: sandboxes that are ready before they are needed, used once, destroyed.

Concurrency: `open` takes a ready sandbox, or waits for one that is started for it in a task of its own; one refill task
keeps ``pool_size`` ready. A launch whose caller was cancelled goes on and its sandbox becomes a ready one. Everything
that was launched is counted as opened, everything that was destroyed as closed. `aclose` ends the refill, refuses those
who wait, and destroys ready and used ones alike; it runs at the latest when the event loop is shut down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from agentgym.errors import AgentGymError, InfraError, SessionClosed, boundary
from agentgym.resources import finish
from agentgym.sandbox import SandboxBackend, SandboxConfig
from agentgym.sandbox_labels import Labels
from agentgym.session_manager import Permits
from agentgym.tools.sandbox.auto import choose_backend
from agentgym.tools.sandbox.client import SandboxClient

logger = logging.getLogger(__name__)

MAX_LAUNCHES = 2 * len(os.sched_getaffinity(0))
"""Sandboxes that start at the same time: more would only make all of them late."""
RETRY_DELAYS = (0.1, 1.0, 5.0, 30.0)
"""Seconds that the refill waits after failures in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counters of a pool since it was made."""

    opened: int
    """Sandboxes that were started."""
    closed: int
    """Those that were destroyed."""
    used: int
    """Those that were handed out."""
    live: int
    """Handed out and not closed yet."""
    ready: int
    """Started and unused."""
    failed: int
    """Starts that failed."""


class PooledSandbox(SandboxClient):
    """A sandbox that tells its pool when it is closed."""

    pool: SandboxPool

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            self.pool._gone(self)


class SandboxPool:
    """See the module's text. Belongs to the event loop on which it was first used.

    Args:
        config: of the sandboxes; ``pool_size``, ``limit`` and ``open_timeout`` are the pool's.
        backend: None: the one that the config names.
    """

    def __init__(self, config: SandboxConfig, backend: SandboxBackend | None = None) -> None:
        self.config = config
        self._backend = backend
        self._permits = Permits(config.limit)
        self._ready: deque[PooledSandbox] = deque()
        self._live: set[PooledSandbox] = set()
        self._launches: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[PooledSandbox]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._failures = 0
        self._opened = self._closed = self._used = self._failed = 0
        self._closing: asyncio.Task[None] | None = None

    def stats(self) -> PoolStats:
        """The counters now."""
        return PoolStats(
            opened=self._opened,
            closed=self._closed,
            used=self._used,
            live=len(self._live),
            ready=len(self._ready),
            failed=self._failed,
        )

    async def open(self) -> PooledSandbox:
        """A fresh sandbox, which the caller closes; first come, first served.

        Raises:
            InfraError: none could be started, or not in time.
            ConfigError: the backend does not work here, or not with these settings.
            SessionClosed: the pool is closed.
        """
        self._refuse_if_closed()
        if self._backend is None:
            self._backend = await choose_backend(self.config)
        await self._permits.acquire(1)
        try:
            sandbox = await self._take()
        except BaseException:
            self._permits.release(1)
            raise
        self._live.add(sandbox)
        self._used += 1
        return sandbox

    async def aclose(self) -> None:
        """Destroy everything and take no more callers. Idempotent; a cancellation is raised at the end.

        What cannot be destroyed is logged.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._destroy(), name="close of a sandbox pool")
        await finish(self._closing)

    async def _take(self) -> PooledSandbox:
        self._refuse_if_closed()
        while self._ready:
            sandbox = self._ready.popleft()
            if not sandbox.lost:
                self._refill()
                return sandbox
            await sandbox.close()
        granted: asyncio.Future[PooledSandbox] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        self._refill()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove(granted)
            elif granted.exception() is None:  # granted and cancelled in the same pass of the event loop
                self._offer(granted.result())
            raise

    # -- launches ---------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Start what is missing: one for everyone who waits, and the ready ones unless starts fail."""
        if self._closing is not None:
            return
        missing = len(self._waiting) - len(self._launches)
        if self._failures == 0:
            spare = self.config.pool_size - len(self._ready) + len(self._waiting) - len(self._launches)
            missing = max(missing, spare)
        for _ in range(min(missing, MAX_LAUNCHES - len(self._launches))):
            task = asyncio.create_task(self._launch(), name="start a sandbox")
            self._launches.add(task)
            task.add_done_callback(self._launches.discard)

    async def _launch(self) -> None:
        """Start one and offer it; a failure goes to the first who waits."""
        try:
            async with asyncio.timeout(self.config.open_timeout):
                with boundary("starting a sandbox"):
                    sandbox = await self._start()
        except (TimeoutError, AgentGymError) as error:
            self._launches.discard(_current_task())
            self._fail(error)
            return
        self._launches.discard(_current_task())
        self._failures = 0
        self._offer(sandbox)
        self._refill()

    async def _start(self) -> PooledSandbox:
        assert self._backend is not None
        labels = Labels()
        channel = await self._backend.launch(self.config, labels)
        self._opened += 1
        sandbox = PooledSandbox(labels.session, self._backend.name, channel, self.config)
        sandbox.pool = self
        try:
            await sandbox.start(self._backend.worker_settings(self.config, labels))
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _offer(self, sandbox: PooledSandbox) -> None:
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(sandbox)
                return
        self._ready.append(sandbox)

    def _fail(self, error: BaseException) -> None:
        self._failed += 1
        self._failures += 1
        if isinstance(error, TimeoutError):
            error = InfraError(f"no sandbox started within {self.config.open_timeout:g} s")
        logger.warning("a sandbox did not start: %s", error)
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_exception(error)
                break
        if self._retry is None and self._closing is None:
            delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS)) - 1]
            self._retry = asyncio.get_running_loop().call_later(delay, self._try_again)
        self._refill()

    def _try_again(self) -> None:
        self._retry = None
        failures, self._failures = self._failures, 0
        self._refill()
        self._failures = failures if self._launches else 0

    # -- the end ----------------------------------------------------------------------------------------------------

    def _gone(self, sandbox: PooledSandbox) -> None:
        """Called by a sandbox that was destroyed."""
        self._closed += 1
        if sandbox in self._live:
            self._live.discard(sandbox)
            self._permits.release(1)

    async def _destroy(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        reason = "the pool of sandboxes was closed"
        self._permits.refuse(reason)
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_exception(SessionClosed(reason))
        launches = list(self._launches)
        for task in launches:
            task.cancel()
        if launches:
            await asyncio.wait(launches)
        sandboxes = [*self._ready, *self._live]
        self._ready.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
        if self._backend is not None:
            try:
                await self._backend.aclose()
            except InfraError as error:
                logger.error("%s. `agentgym sandbox reap` removes it once that works again", error)

    def _refuse_if_closed(self) -> None:
        if self._closing is not None:
            raise SessionClosed("the pool of sandboxes is closed; make a new one")


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


# -- the pools of an event loop ----------------------------------------------------------------------------------------


class _LoopPools:
    """The shared pools of one event loop."""

    def __init__(self) -> None:
        self.pools: dict[SandboxConfig, SandboxPool] = {}
        self.guard = self._close_with_loop()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """Suspended until the loop is shut down: loops close the async generators that they know."""
        try:
            yield
        finally:
            for pool in self.pools.values():
                await pool.aclose()


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPools] = weakref.WeakKeyDictionary()


def shared_pool(config: SandboxConfig) -> SharedPool:
    """What gives out sandboxes of the running event loop's pool for ``config``."""
    return SharedPool(config)


class SharedPool:
    """Opens sandboxes from the pool that all sessions of an event loop with the same settings share."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    async def open(self) -> PooledSandbox:
        """See `SandboxPool.open`."""
        loop = asyncio.get_running_loop()
        pools = _loops.get(loop)
        if pools is None:
            pools = _loops[loop] = _LoopPools()
            await anext(pools.guard)
        pool = pools.pools.get(self.config)
        if pool is None:
            pool = pools.pools[self.config] = SandboxPool(self.config)
        return await pool.open()


async def close_shared_pools() -> None:
    """Destroy every sandbox of the running event loop's shared pools; the next use makes new pools."""
    pools = _loops.pop(asyncio.get_running_loop(), None)
    if pools is not None:
        await pools.guard.aclose()


def shared_stats() -> list[PoolStats]:
    """Counters of the running event loop's shared pools."""
    pools = _loops.get(asyncio.get_running_loop())
    return [] if pools is None else [pool.stats() for pool in pools.pools.values()]
