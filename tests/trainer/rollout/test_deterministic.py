"""Equal requests give equal bits, whatever the timing of the callers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from agentgym.errors import ConfigError, SessionError
from agentgym.generation import SamplingParams
from agentgym.trainer.rollout import decoder
from agentgym.trainer.rollout.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
Record = dict[str, list[tuple[tuple[int, ...], tuple[float, ...], int]]]


async def play_batch(
    engine: TorchEngine, *, jitter: int, sessions: int = 14, limit: int = 6, name: str = "b"
) -> Record:
    """Play sessions of one to four turns with random pauses; everything but the pauses is the same each time."""
    keys = [f"{name}/{i}" for i in range(sessions)]
    pauses = random.Random(jitter)
    places = asyncio.Semaphore(limit)
    record: Record = {}
    engine.begin_batch(keys, limit)

    async def play(index: int) -> None:
        rng = random.Random(index // 2)
        history = [5] * 20 + rng.choices(range(300), k=rng.randrange(1, 30))
        own = random.Random(1000 + index)
        async with places:
            record[keys[index]] = []
            for turn in range(own.randrange(1, 5)):
                await asyncio.sleep(pauses.random() * 0.01)
                sampling = SamplingParams(max_tokens=own.randrange(1, 16), seed=index * 10 + turn)
                generation = await engine.generate(history, sampling, keys[index])
                record[keys[index]].append(
                    (tuple(generation.token_ids), tuple(generation.logprobs), generation.cached_tokens)
                )
                history = [*history, *generation.token_ids, *own.choices(range(300), k=own.randrange(1, 12))]
                if own.random() < 0.2:  # a rollout that starts again, as after a lost sandbox
                    await engine.release(keys[index])
            if pauses.random() < 0.5:
                await engine.release(keys[index])
        await asyncio.sleep(pauses.random() * 0.01)
        engine.finish(keys[index])

    await asyncio.gather(*(play(i) for i in range(sessions)))
    return record


async def decoding(engine: TorchEngine) -> None:
    """Come back when the engine has made its first token."""
    while True:
        if engine.stats()["generated_tokens"]:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize(("slots", "shared"), [(3, False), (6, False), (6, True), (16, True)])
async def test_two_runs_with_other_timing_give_equal_bits(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, slots: int, shared: bool
) -> None:
    if shared:
        monkeypatch.setattr(decoder, "MIN_SPARED_BYTES", 1)
    engine = make_engine(max_slots=slots, deterministic=True)
    first = await play_batch(engine, jitter=1)
    # The same engine again: nothing of the first batch, nor of what was played between, is left.
    await engine.generate([5] * 25, SamplingParams(max_tokens=3), "between")
    assert await play_batch(engine, jitter=2) == first
    fresh = make_engine(max_slots=slots, deterministic=True)
    assert await play_batch(fresh, jitter=3) == first
    assert (fresh.stats()["shared_steps"] > 0) == shared


async def test_a_batch_depends_on_its_weights_and_not_on_their_history(make_engine: MakeEngine, llama: Any) -> None:
    engine = make_engine(deterministic=True)
    await play_batch(engine, jitter=1, name="old")
    await engine.update_weights(llama(seed=1).state_dict(), 1)
    resumed = make_engine(llama(seed=1), deterministic=True)
    assert await play_batch(engine, jitter=2) == await play_batch(resumed, jitter=3)


async def test_a_key_outside_the_batch_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    engine.begin_batch(["a", "b"], 2)
    with pytest.raises(SessionError, match="session key 'c' was not announced"):
        await engine.generate([1, 2], SamplingParams(max_tokens=1), "c")
    engine.finish("a")
    with pytest.raises(SessionError, match="session key 'a' is finished"):
        await engine.generate([1, 2], SamplingParams(max_tokens=1), "a")
    with pytest.raises(ConfigError, match="'c' is not in the batch"):
        engine.finish("c")
    # When the batch is over, admission is immediate again.
    engine.finish("b")
    assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2), "c")).token_ids) == 2


async def test_a_turn_waits_until_every_open_key_asks_or_is_finished(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    engine.begin_batch(["a", "b", "c"], 2)
    a = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=2), "a"))
    done, _ = await asyncio.wait([a], timeout=0.1)
    assert not done
    engine.finish("b")  # now a and c are open
    done, _ = await asyncio.wait([a], timeout=0.1)
    assert not done
    assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2), "c")).token_ids) == 2
    assert len((await a).token_ids) == 2


async def test_a_cancelled_key_that_is_finished_does_not_hold_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    engine.begin_batch(["a", "b", "c"], 3)
    tasks = [
        asyncio.create_task(engine.generate([1, i], SamplingParams(max_tokens=240), key)) for i, key in enumerate("ab")
    ]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    engine.finish("a")
    engine.finish("c")
    assert len((await tasks[1]).token_ids) == 240


async def test_an_update_during_a_batch_does_not_hang(make_engine: MakeEngine, llama: Any) -> None:
    engine = make_engine(deterministic=True)
    engine.begin_batch(["a", "b"], 2)
    turns = [
        asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=n), key))
        for key, n in (("a", 2), ("b", 99))
    ]
    await turns[0]  # a barrier is due now, and it waits for the next turn of "a"
    await engine.update_weights(llama(seed=1).state_dict(), 1)
    assert (await turns[1]).weight_version == 0
    assert (await asyncio.gather(*(engine.generate([3, 4], SamplingParams(max_tokens=2), k) for k in "ab")))[
        1
    ].weight_version == 1


async def test_begin_batch_cuts_off_what_is_still_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    running = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=240), "x"))
    await decoding(engine)
    engine.begin_batch(["a"], 1)
    with pytest.raises(SessionError, match="'x' was cut off by begin_batch"):
        await running
    assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2), "a")).token_ids) == 2


async def test_without_the_mode_batches_are_not_gated(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=False)
    engine.begin_batch(["a", "b"], 2)
    assert len((await engine.generate([1, 2], SamplingParams(max_tokens=2), "a")).token_ids) == 2
    engine.finish("anything")
