from __future__ import annotations

import asyncio

import pytest

from agentgym.tool_instance import bounded, together


async def give(value: int, turns: int = 0) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return value


async def test_bounded_gives_the_result_or_the_error() -> None:
    assert await bounded(give(3), 1.0, what="x") == 3

    async def fail() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        await bounded(fail(), 1.0, what="x")


async def test_bounded_cancels_what_takes_too_long_and_waits_for_its_end() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("unwound")

    with pytest.raises(TimeoutError):
        await bounded(slow(), 0.01, what="x")
    assert ended == ["unwound"]


async def test_bounded_passes_a_cancellation_on_and_waits_for_the_end() -> None:
    ended: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await go.wait()
            ended.append("unwound")

    run = asyncio.ensure_future(bounded(slow(), 60.0, what="x"))
    await begun.wait()
    run.cancel()
    await asyncio.sleep(0)
    run.cancel()  # a second one changes nothing
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == ["unwound"]


async def test_together_keeps_the_order() -> None:
    assert await together([give(1, turns=5), give(2), give(3, turns=2)]) == [1, 2, 3]
    assert await together([]) == []


async def test_together_raises_the_first_error_in_order_and_cancels_the_rest() -> None:
    ended: list[str] = []

    async def fail(text: str) -> int:
        raise ValueError(text)

    async def slow() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")
        return 0

    with pytest.raises(ValueError, match="first"):
        await together([slow(), fail("first"), fail("second")])
    assert ended == ["slow"]
