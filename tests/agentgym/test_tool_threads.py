from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from agentgym.tool_threads import ToolThreads, run_in_thread

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Stuck:
    """A call that does not return until it is told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> bool:
        self._loop.call_soon_threadsafe(self.begun.set)
        return self.go.wait(10)


async def test_blocking_calls_of_many_sessions_run_side_by_side() -> None:  # D7
    """All 64 calls wait for each other: with fewer threads than calls none would end."""
    threads, barrier = ToolThreads(), threading.Barrier(64)
    async with asyncio.timeout(10):
        ranks = await asyncio.gather(*(threads.run(barrier.wait) for _ in range(64)))
    assert sorted(ranks) == list(range(64))


async def test_the_event_loop_goes_on_meanwhile_and_context_variables_arrive() -> None:  # D7
    variable.set("here")
    go = threading.Event()

    def wait_and_read() -> tuple[bool, str]:
        found = go.wait(5), variable.get()
        variable.set("changed in the thread")
        return found

    call = asyncio.ensure_future(run_in_thread(wait_and_read))
    await asyncio.sleep(0)
    go.set()  # reached only because the loop is not blocked
    assert await call == (True, "here")
    assert variable.get() == "here"


async def test_idle_threads_are_used_again() -> None:
    threads = ToolThreads()
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(50)}
    assert len(names) <= 2  # the second, if the first had not yet come back when its result was there


async def test_errors_reach_the_caller() -> None:
    threads = ToolThreads()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(lambda: next(iter(())))
    assert await threads.run(lambda: 1) == 1


async def test_a_call_given_up_is_quarantined_counted_and_not_held_against_the_limit() -> None:
    threads, call = ToolThreads(limit=1), Stuck()
    stuck = asyncio.ensure_future(threads.run(call))
    await call.begun.wait()
    waiting = asyncio.ensure_future(threads.run(lambda: "served"))  # behind it: the limit is one thread
    await asyncio.sleep(0)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert await asyncio.wait_for(waiting, 5) == "served"
    assert (threads.quarantined, threads.quarantined_total) == (1, 1)
    call.go.set()
    both = threading.Barrier(2)  # passed only when the thread that was stuck serves again
    await asyncio.wait_for(asyncio.gather(threads.run(both.wait), threads.run(both.wait)), 5)
    assert (threads.quarantined, threads.quarantined_total) == (0, 1)


async def test_a_call_given_up_before_it_began_never_runs() -> None:
    threads, call, ran = ToolThreads(limit=1), Stuck(), list[int]()
    first = asyncio.ensure_future(threads.run(call))
    await call.begun.wait()
    second = asyncio.ensure_future(threads.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    call.go.set()
    assert await first
    assert await threads.run(lambda: "third") == "third"
    assert ran == []
    assert threads.quarantined_total == 0


def test_a_loop_that_is_gone_does_not_break_the_thread() -> None:
    threads, go = ToolThreads(limit=1), threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run(go.wait), 0.01)

    asyncio.run(give_up())
    go.set()
    assert asyncio.run(threads.run(lambda: "next loop")) == "next loop"
