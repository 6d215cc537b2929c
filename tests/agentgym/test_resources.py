"""A stack of things to release. What a session does with it is tested with the session."""

from __future__ import annotations

import asyncio

import pytest

from agentgym.resources import Resources


async def test_what_came_last_is_released_first_and_once() -> None:
    log: list[str] = []

    async def note(what: str) -> None:
        log.append(what)

    resources = Resources()
    resources.push("a", lambda: note("a"))
    assert await resources.acquire("b", lambda: asyncio.sleep(0, "b"), note) == "b"
    resources.push("c", lambda: note("c"))
    report = await resources.release()
    assert log == ["c", "b", "a"]
    assert (report.errors, report.quarantined) == (0, 0)
    await resources.release()
    assert log == ["c", "b", "a"]
    resources.push("d", lambda: note("d"))  # it may be used again, for the next episode
    await resources.release()
    assert log[-1] == "d"


async def test_a_cancelled_release_goes_on_to_its_end_and_raises_then() -> None:
    started, go = asyncio.Event(), asyncio.Event()
    log: list[str] = []

    async def wait() -> None:
        started.set()
        await go.wait()
        log.append("waited")

    async def note() -> None:
        log.append("other")

    resources = Resources()
    resources.push("other", note)
    resources.push("slow", wait)
    task = asyncio.create_task(resources.release())
    await started.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["waited", "other"]


async def test_ids_of_owners_are_unique() -> None:
    assert Resources().owner != Resources().owner
