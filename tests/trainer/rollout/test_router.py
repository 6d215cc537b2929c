"""Routing, death and updates, with `ScriptedEngine`s that can be made to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from agentgym.errors import ConfigError, InfraError
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout.router import EngineRouter
from agentgym.trainer.rollout.scripted import ScriptedEngine

SAMPLING = SamplingParams(max_tokens=3)


class Fragile(ScriptedEngine):
    """A scripted engine in a place; its requests wait while `hold` is clear, and it can die."""

    def __init__(self, number: int, tokenizer: Any) -> None:
        super().__init__(lambda session, turn, prompt: "la la la la", tokenizer=tokenizer)
        self.number = number
        self.hold = asyncio.Event()
        self.hold.set()
        self.dead = False
        self.broken_start: str | None = None
        self.killed = False
        self.served: list[str] = []
        self.cancelled: list[str] = []
        self.update_fault: Exception | None = None

    async def ready(self) -> None:
        if self.broken_start is not None:
            raise InfraError(self.broken_start)

    def check(self) -> None:
        if self.dead:
            raise InfraError("dead")

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        self.check()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.append(session_id)
            raise
        self.check()
        self.served.append(session_id)
        return await super().generate(prompt_ids, sampling, session_id)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.check()
        if self.update_fault is not None:
            raise self.update_fault
        await asyncio.sleep(0)
        await super().update_weights(weights, version)

    async def ping(self) -> None:
        self.check()

    def kill(self) -> None:
        self.dead = self.killed = True


class Farm:
    """All engines that were ever made."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.made: list[Fragile] = []
        self.prepare: Callable[[Fragile], None] = lambda engine: None
        self.third = asyncio.Event()

    def __call__(self, number: int) -> Fragile:
        engine = Fragile(number, self.tokenizer)
        self.made.append(engine)
        if len(self.made) == 3:
            self.third.set()
        self.prepare(engine)
        return engine


@pytest.fixture
def farm(tokenizer: Any) -> Farm:
    return Farm(tokenizer)


Make = Callable[..., EngineRouter]


@pytest.fixture
async def make(farm: Farm) -> AsyncIterator[Make]:
    routers: list[EngineRouter] = []

    def router(count: int, **settings: Any) -> EngineRouter:
        routers.append(EngineRouter(farm, count, **{"health_every": 60.0, **settings}))
        return routers[-1]

    yield router
    for one in routers:
        await one.aclose()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_sessions_spread_and_stay(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    for engine in farm.made:
        engine.hold.clear()
    turns = [asyncio.create_task(router.generate([1], SAMPLING, f"s{i}")) for i in range(6)]
    await settle()
    for engine in farm.made:
        engine.hold.set()
    await asyncio.gather(*turns)
    first = [sorted(engine.served) for engine in farm.made]
    assert [len(served) for served in first] == [3, 3]
    for i in range(6):
        await router.generate([1], SAMPLING, f"s{i}")
    assert [sorted(set(engine.served)) for engine in farm.made] == first
    assert router.stats()["moves"] == 0


async def test_a_session_leaves_a_busy_engine(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    await router.generate([1], SAMPLING, "s")
    home = next(engine for engine in farm.made if "s" in engine.served)
    other = next(engine for engine in farm.made if engine is not home)
    home.hold.clear()
    for engine in farm.made:
        router._homes.update({f"{engine.number}-{i}": engine.number for i in range(4)})
    busy = [asyncio.create_task(router.generate([1], SAMPLING, f"{home.number}-{i}")) for i in range(4)]
    await settle()
    await asyncio.wait_for(router.generate([1], SAMPLING, "s"), 1)
    assert "s" in other.served
    assert router.stats()["moves"] >= 1
    home.hold.set()
    await asyncio.gather(*busy)


async def test_a_request_of_a_dead_engine_is_tried_elsewhere_and_the_engine_is_replaced(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    await router.update_weights({}, 4)
    await router.generate([1], SAMPLING, "s")
    home = next(engine for engine in farm.made if "s" in engine.served)
    home.hold.clear()
    turn = asyncio.create_task(router.generate([1], SAMPLING, "s"))
    await settle()
    home.dead = True
    home.hold.set()
    generation = await asyncio.wait_for(turn, 1)
    assert generation.weight_version == 4
    await settle()
    assert len(farm.made) == 3
    assert home.killed
    assert farm.made[2].number == home.number
    # The new one has the current weights.
    assert farm.made[2].version == 4
    assert router.stats()["retries"] == router.stats()["restarts"] == 1


async def test_a_lone_engine_that_dies_is_waited_for(make: Make, farm: Farm) -> None:
    router = make(1)
    await router.generate([1], SAMPLING, "s")
    farm.made[0].dead = True
    await asyncio.wait_for(router.generate([1], SAMPLING, "s"), 1)
    assert farm.made[1].served == ["s"]


async def test_a_request_that_fails_on_two_engines_fails(make: Make, farm: Farm) -> None:
    def refuse(engine: Fragile) -> None:
        async def generate(*_: Any) -> Generation:
            raise InfraError("no")

        engine.generate = generate  # type: ignore[method-assign]

    farm.prepare = refuse
    router = make(2)
    with pytest.raises(InfraError, match="no"):
        await router.generate([1], SAMPLING, "s")
    # They answer when asked how they are, so they are kept.
    await settle()
    assert len(farm.made) == 2


async def test_health_checks_find_a_dead_engine_without_requests(make: Make, farm: Farm) -> None:
    router = make(2, health_every=0.01)
    await router.ready()
    farm.made[1].served.append("earlier")
    farm.made[1].dead = True
    await asyncio.wait_for(farm.third.wait(), 5)
    assert farm.made[2].number == 1


async def test_an_engine_that_never_started_is_an_error_with_its_reason(make: Make, farm: Farm) -> None:
    farm.prepare = lambda engine: setattr(engine, "broken_start", "no memory")
    router = make(2)
    with pytest.raises(InfraError, match="no engine could be started: no memory"):
        await router.ready()
    with pytest.raises(InfraError, match="no memory"):
        await router.generate([1], SAMPLING, "s")


async def test_a_turn_has_a_deadline_and_is_aborted_at_it(make: Make, farm: Farm) -> None:
    router = make(1, request_timeout=0.05)
    await router.ready()
    farm.made[0].hold.clear()
    with pytest.raises(InfraError, match=r"session 's': a turn of at most 3 tokens did not end within 0 s"):
        await router.generate([1], SAMPLING, "s")
    assert farm.made[0].cancelled == ["s"]


async def test_cancelling_a_turn_aborts_it_in_the_engine(make: Make, farm: Farm) -> None:
    router = make(1)
    await router.ready()
    farm.made[0].hold.clear()
    turn = asyncio.create_task(router.generate([1], SAMPLING, "s"))
    await settle()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert farm.made[0].cancelled == ["s"]


async def test_an_update_is_one_moment_for_all_engines(make: Make, farm: Farm) -> None:
    # H4
    router = make(2)
    await router.ready()
    farm.made[0].hold.clear()
    farm.made[1].hold.clear()
    before = [asyncio.create_task(router.generate([1], SAMPLING, f"b{i}")) for i in range(4)]
    await settle()
    update = asyncio.create_task(router.update_weights({}, 1))
    await settle()
    after = [asyncio.create_task(router.generate([1], SAMPLING, f"a{i}")) for i in range(4)]
    await settle()
    farm.made[0].hold.set()
    await settle()
    # One engine is idle, and still nothing is served by it: the other one has the old weights.
    assert not any(name.startswith("a") for name in farm.made[0].served)
    farm.made[1].hold.set()
    await update
    assert {g.weight_version for g in await asyncio.gather(*before)} == {0}
    assert {g.weight_version for g in await asyncio.gather(*after)} == {1}


async def test_an_engine_that_fails_at_an_update_never_serves_older_weights(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    farm.made[0].update_fault = InfraError("torn")
    await router.update_weights({}, 7)
    versions = await asyncio.gather(*(router.generate([1], SAMPLING, f"s{i}") for i in range(8)))
    assert {g.weight_version for g in versions} == {7}
    await settle()
    assert farm.made[0].killed
    assert farm.made[2].version == 7


async def test_nobody_waits_for_an_engine_that_is_started_anew(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    started = asyncio.Event()

    def wait_to_start(engine: Fragile) -> None:
        engine.ready = started.wait  # type: ignore[method-assign,assignment]

    farm.prepare = wait_to_start
    farm.made[0].dead = True
    await router.generate([1], SAMPLING, "s")
    await router.generate([1], SAMPLING, "t")
    await farm.third.wait()
    await asyncio.wait_for(router.update_weights({}, 2), 1)
    await asyncio.wait_for(router.ready(), 1)
    assert (await router.generate([1], SAMPLING, "s")).weight_version == 2
    # It takes the weights that came while it started.
    started.set()
    await settle()
    assert farm.made[2].version == 2


async def test_weights_that_do_not_fit_change_nothing(make: Make, farm: Farm) -> None:
    router = make(1)
    await router.update_weights({}, 1)
    farm.made[0].update_fault = ConfigError("1 unknown names")
    with pytest.raises(ConfigError, match="unknown"):
        await router.update_weights({}, 2)
    assert (await router.generate([1], SAMPLING, "s")).weight_version == router.version == 1


async def test_closing_fails_who_waits_and_ends_every_engine(make: Make, farm: Farm) -> None:
    router = make(2)
    await router.ready()
    await router.aclose()
    assert all(engine.killed for engine in farm.made)
    with pytest.raises(InfraError, match="closed"):
        await router.generate([1], SAMPLING, "s")
