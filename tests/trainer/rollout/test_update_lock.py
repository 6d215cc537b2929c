from __future__ import annotations

import asyncio

from agentgym.trainer.rollout.update_lock import UpdateLock


async def settle() -> None:
    """Let every task run as far as it gets."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_update_waits_for_requests_inside_and_holds_back_later_ones() -> None:
    lock, events, leave = UpdateLock(), list[str](), asyncio.Event()

    async def request(name: str, until: asyncio.Event | None) -> None:
        async with lock.request():
            events.append(f"{name} in")
            if until is not None:
                await until.wait()
            events.append(f"{name} out")

    async def update(name: str) -> None:
        async with lock.update():
            events.append(f"{name} on")
            await asyncio.sleep(0)
            events.append(f"{name} off")

    tasks = [asyncio.create_task(request("a", leave))]
    await settle()
    tasks += [asyncio.create_task(update("u"))]
    await settle()
    tasks += [asyncio.create_task(request("b", None))]
    await settle()
    assert events == ["a in"]
    leave.set()
    await asyncio.gather(*tasks)
    assert events == ["a in", "a out", "u on", "u off", "b in", "b out"]


async def test_a_cancelled_request_lets_the_update_go_on() -> None:
    lock, forever = UpdateLock(), asyncio.Event()

    async def request() -> None:
        async with lock.request():
            await forever.wait()

    async def update() -> None:
        async with lock.update():
            pass

    stuck = asyncio.create_task(request())
    await settle()
    waiting = asyncio.create_task(update())
    await settle()
    assert not waiting.done()
    stuck.cancel()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(update(), 1)
