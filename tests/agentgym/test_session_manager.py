"""The session manager: one global limit, first come first served, and an end for every session on every path."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.env import Env
from agentgym.errors import AgentGymError, ConfigError, SessionClosed, SessionError, UnknownName
from agentgym.registration import EnvSpec
from agentgym.session import Session
from agentgym.session_manager import Permits, SessionManager
from agentgym.types import RolloutStatus

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: exact times, and no waiting."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            self.now = max(self.now, min(timers, default=self.now))
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass
class World:
    """What happened to the environments of one test."""

    live: int = 0
    peak: int = 0
    made: int = 0
    closed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What one environment does in each of its methods, after some passes of the event loop."""

    make: str = "ok"
    reset: str = "ok"
    steps: tuple[str, ...] = ("ok", "end")
    truncate: str = "ok"
    close: str = "ok"
    passes: int = 1


class Scripted(Env):
    def __init__(self, *, world: World, plan: Plan) -> None:
        self.world, self.plan, self.number = world, plan, world.made
        self.left = list(plan.steps)
        if plan.make == "raise":
            raise RuntimeError("make")
        world.made += 1
        world.live += 1
        world.peak = max(world.peak, world.live)

    async def act(self, what: str) -> None:
        for _ in range(self.plan.passes):
            await asyncio.sleep(0)
        if what == "raise":
            raise RuntimeError("planned")
        if what == "hang":
            await asyncio.Event().wait()
        if what == "slow":
            await asyncio.sleep(1.0)
        if what == "stubborn":
            try:
                await asyncio.sleep(50.0)
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await self.act(self.plan.reset)
        return ({"role": "user", "content": "go"},), {}

    async def astep(self, action: Any) -> Any:
        what = self.left.pop(0) if self.left else "end"
        await self.act(what)
        return ({"role": "user", "content": "on"},), 1.0, what == "end", False, {}

    async def atruncate(self, status: RolloutStatus) -> float | None:
        await self.act(self.plan.truncate)
        return 0.0

    async def aclose(self) -> None:
        self.world.closed.append(self.number)
        self.world.live -= 1
        await self.act(self.plan.close)


SCRIPTED = EnvSpec(id="agentgym/scripted-v0", entry_point=Scripted)


def scripted(manager: SessionManager, world: World, plan: Plan = Plan(), **kwargs: Any) -> Session:
    return manager.open(SCRIPTED, env_kwargs={"world": world, "plan": plan}, **kwargs)


async def play(session: Session) -> Session:
    async with session:
        while not session.done:
            await session.step("x")
    return session


# -- the limit ----------------------------------------------------------------------------------------------------


async def test_the_limit_is_global_over_groups() -> None:  # D10
    world = World()
    async with SessionManager(3) as manager:

        async def group() -> None:
            await asyncio.gather(*[play(scripted(manager, world, Plan(passes=3))) for _ in range(4)])

        await asyncio.gather(*[group() for _ in range(4)])
        stats = manager.stats()
    assert world.peak == 3
    assert stats.peak == 3
    assert (stats.opened, stats.closed, stats.live, stats.completed) == (16, 16, 0, 16)


async def test_permits_come_back_after_exceptions() -> None:  # D10
    world = World()
    async with SessionManager(2) as manager:
        bad = [Plan(make="raise"), Plan(reset="raise"), Plan(steps=("raise",)), Plan(close="raise")]
        results = await asyncio.gather(
            *[play(scripted(manager, world, plan)) for plan in bad * 3], return_exceptions=True
        )
        assert sum(isinstance(result, AgentGymError) for result in results) == 9
        assert manager.stats().failed == 9
        assert manager.stats().release_errors == 3
        async with scripted(manager, world), scripted(manager, world):
            assert manager.stats().live == 2


async def test_a_request_for_more_than_the_limit_is_refused_at_once() -> None:  # D10
    async with SessionManager(3) as manager:
        with pytest.raises(ConfigError, match="takes 5 slots can never open under limit=3"):
            scripted(manager, World(), slots=5)
        with pytest.raises(ConfigError):
            scripted(manager, World(), slots=0)
        async with scripted(manager, World(), slots=3):
            waiting = asyncio.create_task(play(scripted(manager, World())))
            await settle()
            assert manager.stats().waiting == 1
        await waiting


async def test_those_who_wait_are_served_in_order_and_a_large_request_is_not_overtaken() -> None:
    permits = Permits(3)
    order: list[str] = []

    async def take(name: str, slots: int) -> None:
        await permits.acquire(slots)
        order.append(name)

    await take("first", 2)
    tasks = [asyncio.create_task(take(name, slots)) for name, slots in (("large", 3), ("small", 1), ("tiny", 1))]
    await settle()
    assert order == ["first"]  # one permit is free, but the large request is first
    permits.release(2)
    await settle()
    assert order == ["first", "large"]
    permits.release(1)
    await settle()
    assert order == ["first", "large", "small"]
    permits.release(2)
    await asyncio.gather(*tasks)
    assert order == ["first", "large", "small", "tiny"]


async def test_a_cancelled_wait_gives_its_place_and_its_permits_back() -> None:
    permits = Permits(2)
    await permits.acquire(2)
    large = asyncio.create_task(permits.acquire(2))
    small = asyncio.create_task(permits.acquire(1))
    await settle()
    large.cancel()
    permits.release(1)
    await small  # it fits as soon as the large request is gone
    late = asyncio.create_task(permits.acquire(1))
    await settle()
    permits.release(1)
    late.cancel()  # granted and cancelled in the same pass
    with pytest.raises(asyncio.CancelledError):
        await late
    await asyncio.wait_for(permits.acquire(1), 1)
    assert permits.waiting == 0


# -- arguments ----------------------------------------------------------------------------------------------------


async def test_wrong_arguments_are_found_before_anything_starts() -> None:
    for wrong in ({"limit": 0}, {"step_timeout": 0}, {"close_timeout": -1.0}, {"session_timeout": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SessionManager(**wrong)
    async with SessionManager() as manager:
        with pytest.raises(UnknownName, match="calculator-math"):
            manager.open("calculator-maths")
        with pytest.raises(ConfigError, match="has no setting 'plam'"):
            async with manager.open(SCRIPTED, env_kwargs={"plam": 1}):
                pass
        assert manager.stats().live == 0


# -- the manager's own end ----------------------------------------------------------------------------------------


async def test_the_exit_closes_what_is_still_open() -> None:
    world = World()
    manager = SessionManager(2)
    async with manager:
        await scripted(manager, world).__aenter__()  # entered and forgotten
        stepping = asyncio.create_task(play(scripted(manager, world, Plan(steps=("hang",)))))
        waiting = asyncio.create_task(play(scripted(manager, world)))
        await settle()
    stats = manager.stats()
    assert (stats.opened, stats.closed, stats.live, stats.cancelled) == (2, 2, 0, 2)
    assert sorted(world.closed) == [0, 1]
    with pytest.raises(asyncio.CancelledError):
        await stepping
    with pytest.raises(SessionClosed):
        await waiting
    with pytest.raises(SessionClosed, match="manager is closed"):
        scripted(manager, world)
    await manager.aclose()


async def test_the_exit_cancels_an_opening() -> None:
    world = World()
    async with SessionManager() as manager:
        opening = asyncio.create_task(play(scripted(manager, world, Plan(reset="hang"))))
        await settle()
    assert world.closed == [0]
    with pytest.raises(asyncio.CancelledError):
        await opening


async def test_a_session_granted_its_permit_while_the_manager_closes_does_not_open() -> None:
    world = World()
    async with SessionManager(1) as manager:
        await manager._permits.acquire(1)
        waiting = asyncio.create_task(scripted(manager, world).__aenter__())
        await settle()
        manager._permits.release(1)  # granted, but the other task has not run yet
    with pytest.raises(SessionClosed):
        await waiting
    assert world.made == 0
    await asyncio.wait_for(manager._permits.acquire(1), 1)


def test_a_cancellation_during_the_exit_waits_until_everything_is_released() -> None:
    async def main() -> tuple[World, SessionManager]:
        world, manager = World(), SessionManager()

        async def body() -> None:
            async with manager:
                await scripted(manager, world, Plan(close="slow")).__aenter__()
                await asyncio.sleep(0)
                raise LookupError

        task = asyncio.create_task(body())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, LookupError)
        assert asyncio.get_running_loop().time() == 1.0
        return world, manager

    world, manager = run_virtual(main())
    assert world.closed == [0]
    assert manager.stats().release_errors == 0


async def test_a_session_cannot_be_dismissed_twice() -> None:
    async with SessionManager() as manager:
        session = await play(scripted(manager, World()))
        with pytest.raises(SessionError, match="not live"):
            await session._release_everything()


# -- property -----------------------------------------------------------------------------------------------------

FAULTS = ["ok", "ok", "ok", "raise", "hang", "slow", "stubborn"]
plans = st.builds(
    Plan,
    make=st.sampled_from(["ok", "ok", "ok", "raise"]),
    reset=st.sampled_from(FAULTS),
    steps=st.lists(st.sampled_from([*FAULTS, "end"]), max_size=3).map(tuple),
    truncate=st.sampled_from(FAULTS),
    close=st.sampled_from(FAULTS),
    passes=st.integers(0, 3),
)


@dataclass(frozen=True)
class Fate:
    """A session, when it starts, and when it is cancelled: (seconds, passes of the event loop)."""

    plan: Plan
    start: int
    slots: int
    cancels: tuple[tuple[float, int], ...]
    max_turns: int | None


fates = st.builds(
    Fate,
    plan=plans,
    start=st.integers(0, 4),
    slots=st.sampled_from([1, 1, 1, 2]),
    cancels=st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.5, 2.5]), st.integers(0, 12)), max_size=3).map(tuple),
    max_turns=st.sampled_from([None, 1, 2]),
)


@settings(max_examples=120, deadline=None)
@given(
    fates=st.lists(fates, min_size=1, max_size=12),
    limit=st.integers(2, 4),
    session_timeout=st.sampled_from([None, 0.7, 3.0]),
    leave_early=st.booleans(),
)
def test_every_session_is_released_exactly_once_under_any_schedule(
    fates: list[Fate], limit: int, session_timeout: float | None, leave_early: bool
) -> None:
    world = World()

    async def one(manager: SessionManager, fate: Fate) -> Session:
        for _ in range(fate.start):
            await asyncio.sleep(0)
        return await play(scripted(manager, world, fate.plan, slots=fate.slots, max_turns=fate.max_turns))

    async def cancel(task: asyncio.Task[Session], fate: Fate) -> None:
        for seconds, passes in fate.cancels:
            await asyncio.sleep(seconds)
            for _ in range(passes):
                await asyncio.sleep(0)
            task.cancel()

    async def main() -> SessionManager:
        manager = SessionManager(
            limit, open_timeout=2.0, step_timeout=2.0, session_timeout=session_timeout, close_timeout=2.0
        )
        async with manager:
            tasks = [asyncio.create_task(one(manager, fate)) for fate in fates]
            cancels = [asyncio.create_task(cancel(task, fate)) for task, fate in zip(tasks, fates, strict=True)]
            if leave_early:
                await asyncio.sleep(1.0)
            else:
                await asyncio.gather(*tasks, return_exceptions=True)
                assert manager.stats().live == 0
                if not any(fate.cancels for fate in fates):
                    assert manager.stats().opened == len(fates)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*cancels)
        assert all(isinstance(r, Session | AgentGymError | asyncio.CancelledError) for r in results), results
        await manager._permits.acquire(limit)  # all permits are back
        return manager

    stats = run_virtual(main()).stats()
    assert stats.opened == stats.closed
    assert stats.live == stats.waiting == 0
    assert stats.completed + stats.truncated + stats.timed_out + stats.failed + stats.cancelled == stats.closed
    assert sorted(world.closed) == list(range(world.made))  # each exactly once
    assert world.peak <= limit
    assert stats.quarantined == 0
