"""What every engine guarantees; a new engine joins by one line in ``conftest.ENGINES``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.generation import SamplingParams

PROMPT = list(range(5, 45))


async def test_ids_and_logprobs_have_equal_length_and_respect_max_tokens(any_engine: Any) -> None:
    for session, count in (("a", 1), ("b", 7)):
        generation = await any_engine.generate(PROMPT, SamplingParams(max_tokens=count, seed=1), session)
        assert len(generation.token_ids) == len(generation.logprobs) == count
        assert generation.finish_reason == "length"
        assert all(logprob <= 0.0 for logprob in generation.logprobs)


async def test_a_stop_id_ends_the_turn_and_is_part_of_it(any_engine: Any) -> None:
    free = await any_engine.generate(PROMPT, SamplingParams(max_tokens=12, seed=1), "a")
    stop = free.token_ids[5]
    first = list(free.token_ids).index(stop)
    await any_engine.release("a")
    cut = await any_engine.generate(PROMPT, SamplingParams(max_tokens=12, seed=1, stop_token_ids=[299, stop]), "a")
    assert list(cut.token_ids) == list(free.token_ids[: first + 1])
    assert cut.finish_reason == "stop"


async def test_a_stop_id_at_the_token_limit_counts_as_stop(any_engine: Any) -> None:
    generation = await any_engine.generate(PROMPT, SamplingParams(max_tokens=1, stop_token_ids=range(300)), "a")
    assert len(generation.token_ids) == 1
    assert generation.finish_reason == "stop"


async def test_a_stop_string_ends_the_turn(any_engine: Any, tokenizer: Any) -> None:
    free = await any_engine.generate(PROMPT, SamplingParams(max_tokens=16, seed=3), "a")
    stop = tokenizer.decode(free.token_ids[3:6])
    await any_engine.release("a")
    cut = await any_engine.generate(PROMPT, SamplingParams(max_tokens=16, seed=3, stop=["never", stop]), "a")
    text = tokenizer.decode(cut.token_ids)
    assert text.endswith(stop)
    assert stop not in tokenizer.decode(cut.token_ids[:-1])
    assert cut.finish_reason == "stop"


async def test_equal_requests_give_equal_turns_whatever_else_runs(any_engine: Any) -> None:
    sampling = SamplingParams(max_tokens=10, seed=7)
    alone = await any_engine.generate(PROMPT, sampling, "x")
    await any_engine.release("x")
    others = [any_engine.generate(PROMPT[:n], SamplingParams(max_tokens=n, seed=n), f"o{n}") for n in range(3, 9)]
    among, *_ = await asyncio.gather(any_engine.generate(PROMPT, sampling, "x"), *others)
    assert list(among.token_ids) == list(alone.token_ids)
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


async def test_release_is_idempotent_and_takes_unknown_sessions(any_engine: Any) -> None:
    await any_engine.release("nobody")
    await any_engine.generate(PROMPT, SamplingParams(max_tokens=2), "a")
    await any_engine.release("a")
    await any_engine.release("a")
    again = await any_engine.generate(PROMPT, SamplingParams(max_tokens=2), "a")
    assert again.cached_tokens == 0


async def test_a_cancelled_request_leaves_a_working_engine(any_engine: Any) -> None:
    task = asyncio.ensure_future(any_engine.generate(PROMPT, SamplingParams(max_tokens=200), "a"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    generation = await any_engine.generate(PROMPT, SamplingParams(max_tokens=3), "a")
    assert len(generation.token_ids) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1)]
)
async def test_impossible_sampling_parameters_are_refused(any_engine: Any, field: str, value: Any) -> None:
    sampling = replace(SamplingParams(max_tokens=4), **{field: value})
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        await any_engine.generate(PROMPT, sampling, "a")


async def test_a_deterministic_batch_can_be_announced_and_finished(any_engine: Any) -> None:
    keys = [f"k{i}" for i in range(5)]
    any_engine.begin_batch(keys, 2)
    for key in keys:
        assert len((await any_engine.generate(PROMPT, SamplingParams(max_tokens=2), key)).token_ids) == 2
        any_engine.finish(key)


async def test_stats_count_requests_and_tokens(any_engine: Any) -> None:
    before = any_engine.stats()
    await any_engine.generate(PROMPT, SamplingParams(max_tokens=4), "a")
    after = any_engine.stats()
    assert after["requests"] - before["requests"] == 1
    assert after["generated_tokens"] - before["generated_tokens"] == 4
    assert after.keys() == before.keys()


async def test_closing_twice_is_fine(any_engine: Any) -> None:
    await any_engine.aclose()
    await any_engine.aclose()
