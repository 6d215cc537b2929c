"""Threads between sync and async code."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from agentgym.errors import SessionClosed, SessionError
from agentgym.sync import LoopThread, SyncThread, block_on, quarantined

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


@pytest.fixture
def thread() -> Iterator[SyncThread]:
    thread = SyncThread("test")
    yield thread
    thread.close(5.0)


def threads_named(part: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if part in thread.name]


async def test_all_calls_run_on_one_thread_that_is_not_the_callers(thread: SyncThread) -> None:
    names = {await thread.run(threading.get_ident) for _ in range(5)}
    assert len(names) == 1
    assert names != {threading.get_ident()}


async def test_calls_run_one_after_the_other_in_the_order_of_submission(thread: SyncThread) -> None:
    seen: list[int] = []
    await asyncio.gather(*(thread.run(seen.append, i) for i in range(50)))
    assert seen == list(range(50))


async def test_context_variables_of_the_caller_reach_the_thread(thread: SyncThread) -> None:  # D7
    VARIABLE.set("outer")
    assert await thread.run(VARIABLE.get) == "outer"
    VARIABLE.set("later")
    assert await thread.run(VARIABLE.get) == "later"


async def test_the_event_loop_goes_on_while_a_call_blocks(thread: SyncThread) -> None:  # D7
    event = threading.Event()
    call = asyncio.create_task(thread.run(event.wait, 30))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(event.set)  # never called if the loop were blocked
    assert await call is True


@pytest.mark.parametrize("error", [ValueError("v"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_what_a_call_raises_reaches_the_caller(thread: SyncThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        thread.call(fail)
    assert thread.call(lambda: "still alive") == "still alive"


async def test_stop_iteration_does_not_hang_the_caller(thread: SyncThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(thread.run(next, iter(())), 5)


async def test_a_cancelled_call_that_has_not_begun_never_runs(thread: SyncThread) -> None:
    event = threading.Event()
    seen: list[str] = []
    first = asyncio.create_task(thread.run(event.wait, 30))
    second = asyncio.create_task(thread.run(seen.append, "second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    event.set()
    await first
    assert await thread.run(seen.copy) == []


def test_call_from_the_thread_itself_runs_at_once(thread: SyncThread) -> None:
    assert thread.call(lambda: thread.call(lambda: thread.current)) is True
    assert thread.current is False


def test_a_call_that_waits_for_async_code_lets_it_use_the_thread(thread: SyncThread) -> None:
    loop = LoopThread("test-loop")
    order: list[str] = []

    async def uses_the_thread() -> str:
        await thread.run(order.append, "inner")
        return "done"

    def outer() -> str:
        order.append("before")
        result = block_on(loop.loop, uses_the_thread(), thread)
        order.append("after")
        return result

    assert thread.submit(outer).result(10) == "done"
    assert order == ["before", "inner", "after"]
    loop.close()


def test_a_thread_closed_while_it_serves_ends_after_the_call(thread: SyncThread) -> None:
    future: Future[str] = Future()
    waiting = thread.submit(thread.wait, future)
    assert thread.close(0.05) is False
    future.set_result("late")
    assert waiting.result(5) == "late"
    assert thread.close(5.0) is True


def test_no_thread_before_the_first_call() -> None:
    thread = SyncThread("never-started")
    assert threads_named("never-started") == []
    assert thread.close() is True


def test_close_is_idempotent_and_refuses_later_calls(thread: SyncThread) -> None:
    thread.call(int)
    before = quarantined()
    assert thread.close(5.0) is True
    assert thread.close() is True
    assert quarantined() == before
    with pytest.raises(SessionClosed, match="closed"):
        thread.submit(int)


def test_close_waits_for_what_was_accepted(thread: SyncThread) -> None:
    event = threading.Event()
    seen: list[str] = []
    thread.submit(event.wait, 30)
    thread.submit(seen.append, "ran")
    threading.Timer(0.05, event.set).start()
    assert thread.close(10.0) is True
    assert seen == ["ran"]


def test_a_thread_that_does_not_come_back_is_quarantined_and_counted_once(
    thread: SyncThread, caplog: pytest.LogCaptureFixture
) -> None:
    event, before = threading.Event(), quarantined()
    future = thread.submit(event.wait, 30)
    assert thread.close(0.05) is False
    assert thread.close(0.05) is False
    assert quarantined() == before + 1
    assert "still inside a call" in caplog.text
    event.set()
    assert future.result(5) is True  # it ends by itself once the call returns
    assert thread.close(5.0) is True


async def test_aclose_leaves_the_loop_free_and_quarantines_on_time(thread: SyncThread) -> None:
    event, before = threading.Event(), quarantined()
    call = asyncio.create_task(thread.run(event.wait, 30))
    await asyncio.sleep(0)
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.005)
            beats += 1

    heartbeat = asyncio.create_task(heart())
    assert await thread.aclose(0.1) is False
    assert quarantined() == before + 1
    assert beats >= 2
    heartbeat.cancel()
    event.set()
    assert await call is True


async def test_aclose_of_an_idle_thread_ends_it(thread: SyncThread) -> None:
    await thread.run(int)
    before = quarantined()
    assert await thread.aclose(5.0) is True
    assert await thread.aclose(5.0) is True
    assert quarantined() == before


async def test_aclose_that_is_cancelled_quarantines_at_once(thread: SyncThread) -> None:
    event, before = threading.Event(), quarantined()
    call = asyncio.create_task(thread.run(event.wait, 30))
    closing = asyncio.create_task(thread.aclose(30))
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert quarantined() == before + 1
    event.set()
    await call


def test_a_forgotten_sync_thread_ends() -> None:
    thread = SyncThread("forgotten-sync")
    thread.call(int)
    (worker,) = threads_named("forgotten-sync")
    del thread
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_loop_thread_runs_coroutines_on_one_loop_with_the_callers_context() -> None:
    thread = LoopThread("test-loop")

    async def where() -> tuple[asyncio.AbstractEventLoop, str]:
        return asyncio.get_running_loop(), VARIABLE.get()

    VARIABLE.set("mine")
    assert block_on(thread.loop, where()) == (thread.loop, "mine")
    assert thread.close(5.0) is True
    assert thread.loop.is_closed()
    assert thread.close(5.0) is True


def test_closing_a_loop_thread_cancels_what_still_runs() -> None:
    thread = LoopThread("test-loop")
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("unwound")

    async def start() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        ended.append("started" if not task.done() else "done")

    block_on(thread.loop, start())
    thread.close(5.0)
    assert ended == ["started", "unwound"]


def test_a_loop_thread_cannot_be_closed_by_its_own_code() -> None:
    thread = LoopThread("test-loop")

    async def close() -> None:
        thread.close()

    with pytest.raises(SessionError, match="close it from its caller"):
        block_on(thread.loop, close())
    thread.close(5.0)


def test_a_blocked_loop_thread_is_quarantined() -> None:
    thread, event, before = LoopThread("test-loop"), threading.Event(), quarantined()

    async def block() -> None:
        event.wait(30)

    future = asyncio.run_coroutine_threadsafe(block(), thread.loop)
    assert thread.close(0.05) is False
    assert quarantined() == before + 1
    event.set()
    future.result(5)


def test_a_forgotten_loop_thread_ends_and_closes_its_loop() -> None:
    thread = LoopThread("forgotten-loop")
    (worker,) = threads_named("forgotten-loop")
    loop = thread.loop
    del thread
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()
    assert loop.is_closed()


def test_an_interrupted_wait_cancels_the_coroutine() -> None:
    thread = LoopThread("test-loop")
    ended: list[str] = []

    async def forever() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(KeyboardInterrupt):
        block_on(thread.loop, forever())
    thread.close(5.0)
    assert ended == ["cancelled"]
