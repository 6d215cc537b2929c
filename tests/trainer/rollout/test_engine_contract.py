"""What every engine guarantees; a new engine joins in ``conftest.ENGINES``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError, SessionError
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
    free = await any_engine.generate(PROMPT, SamplingParams(max_tokens=120, seed=3), "a")
    pairs = [tokenizer.decode(free.token_ids[at : at + 2]) for at in range(2, 118)]
    # Half of a character would become text only with the token after it.
    stop = next(pair for pair in pairs if pair.isascii() and len(pair) == 2)
    await any_engine.release("a")
    cut = await any_engine.generate(PROMPT, SamplingParams(max_tokens=120, seed=3, stop=["never", stop]), "a")
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
    assert len(again.token_ids) == 2


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


async def test_a_version_stands_on_every_turn_that_its_weights_made(any_engine: Any, reference: Any) -> None:
    version = any_engine.version
    assert (await any_engine.generate(PROMPT, SamplingParams(max_tokens=2), "a")).weight_version == version
    await any_engine.update_weights(reference(seed=1).state_dict(), version + 3)
    assert any_engine.version == version + 3
    assert (await any_engine.generate(PROMPT, SamplingParams(max_tokens=2), "a")).weight_version == version + 3


async def test_stats_count_requests_and_tokens(any_engine: Any) -> None:
    before = any_engine.stats()
    await any_engine.generate(PROMPT, SamplingParams(max_tokens=4), "a")
    after = any_engine.stats()
    assert after["requests"] - before["requests"] == 1
    assert after["generated_tokens"] - before["generated_tokens"] == 4
    assert after.keys() == before.keys()


# Engines that run a model


def full_logprobs(model: Any, prompt: Sequence[int], new: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of ``new`` after ``prompt`` in one plain forward."""
    ids = torch.tensor([[*prompt, *new]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
async def test_logprobs_are_those_of_the_sampled_distribution(
    model_engine: Any, reference: Any, temperature: float
) -> None:
    model = reference()
    prompts = [PROMPT[: 7 + 5 * i] for i in range(6)]
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
    generations = await asyncio.gather(*(model_engine.generate(p, sampling, f"s{i}") for i, p in enumerate(prompts)))
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = full_logprobs(model, prompt, generation.token_ids, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)
        if temperature == 0.0:
            ids = torch.tensor([prompt])
            best = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            assert list(generation.token_ids) == best[0, len(prompt) :].tolist()


async def test_the_seed_decides(model_engine: Any) -> None:
    async def ids(seed: int | None, session: str) -> tuple[int, ...]:
        generation = await model_engine.generate(PROMPT, SamplingParams(max_tokens=16, seed=seed), session)
        return tuple(generation.token_ids)

    assert await ids(3, "a") == await ids(3, "b") != await ids(4, "c")
    assert await ids(None, "d") != await ids(None, "e")
    assert len(await ids(2**63 - 1, "f")) == 16


async def test_the_next_turn_reuses_the_history_and_stays_exact(model_engine: Any, reference: Any) -> None:
    first = await model_engine.generate(PROMPT, SamplingParams(max_tokens=50, seed=1), "s")
    history = [*PROMPT, *first.token_ids, 7, 8, 9]
    second = await model_engine.generate(history, SamplingParams(max_tokens=8, seed=2), "s")
    assert second.cached_tokens >= 64
    assert second.logprobs == pytest.approx(full_logprobs(reference(), history, second.token_ids), abs=1e-4)


async def test_an_update_is_atomic_and_forgets_what_older_weights_made(model_engine: Any, reference: Any) -> None:
    # H4
    old, new, version = reference(seed=0), reference(seed=1), model_engine.version
    prompt = [*PROMPT, *PROMPT]
    before = await model_engine.generate(prompt, SamplingParams(max_tokens=5, seed=1), "s")
    running = asyncio.create_task(model_engine.generate(PROMPT[:10], SamplingParams(max_tokens=200, seed=2), "r"))
    await asyncio.sleep(0.05)
    update = asyncio.create_task(model_engine.update_weights(new.state_dict(), version + 1))
    await asyncio.sleep(0)
    # Asked for during the update: served by the new weights, and from nothing that the old ones left.
    history = [*prompt, *before.token_ids, 4]
    after = await model_engine.generate(history, SamplingParams(max_tokens=5, seed=1), "s")
    await update
    in_flight = await running
    assert (before.weight_version, in_flight.weight_version) == (version, version)
    assert after.weight_version == model_engine.version == version + 1
    assert after.cached_tokens == 0
    assert in_flight.logprobs == pytest.approx(full_logprobs(old, PROMPT[:10], in_flight.token_ids), abs=1e-4)
    assert after.logprobs == pytest.approx(full_logprobs(new, history, after.token_ids), abs=1e-4)
    again = await model_engine.generate(prompt, SamplingParams(max_tokens=5, temperature=0.0), "t")
    assert again.logprobs == pytest.approx(full_logprobs(new, prompt, again.token_ids), abs=1e-4)


async def test_weights_that_do_not_fit_change_nothing(model_engine: Any, reference: Any) -> None:
    weights, version = dict(reference(seed=1).state_dict()), model_engine.version
    with pytest.raises(ConfigError, match=r"1 unknown names \['extra'\]"):
        await model_engine.update_weights(weights | {"extra": torch.zeros(1)}, version + 1)
    with pytest.raises(ConfigError, match=r"'model.norm.weight' has shape \(3,\), expected \(32,\)"):
        await model_engine.update_weights(weights | {"model.norm.weight": torch.zeros(3)}, version + 1)
    del weights["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"1 missing \['model.norm.weight'\]"):
        await model_engine.update_weights(weights, version + 1)
    generation = await model_engine.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0.0), "s")
    assert generation.weight_version == version
    assert generation.logprobs == pytest.approx(full_logprobs(reference(), PROMPT, generation.token_ids), abs=1e-4)


async def test_tied_weights_may_be_left_out(model_engine: Any, reference: Any) -> None:
    model = reference(seed=1)
    weights = dict(model.state_dict())
    del weights["lm_head.weight"]
    await model_engine.update_weights(weights, model_engine.version + 1)
    generation = await model_engine.generate(PROMPT, SamplingParams(max_tokens=5, seed=3), "s")
    assert generation.logprobs == pytest.approx(full_logprobs(model, PROMPT, generation.token_ids), abs=1e-4)


async def test_wrong_prompts_are_refused(model_engine: Any) -> None:
    for prompt, message in (([], "the prompt is empty"), ([1, 300], "ids from 1 to 300"), ([-1], "from -1")):
        with pytest.raises(ConfigError, match=message):
            await model_engine.generate(prompt, SamplingParams(max_tokens=1), "s")


async def test_nothing_is_generated_past_the_longest_length(model_engine: Any) -> None:  # B11
    prompt = [5] * 250
    generation = await model_engine.generate(prompt, SamplingParams(max_tokens=50), "s")
    assert (len(generation.token_ids), generation.finish_reason) == (6, "length")
    with pytest.raises(ConfigError, match="a prompt of 256 tokens leaves no room"):
        await model_engine.generate([5] * 256, SamplingParams(max_tokens=1), "s")


async def test_a_session_has_one_turn_at_a_time(model_engine: Any) -> None:
    first = asyncio.create_task(model_engine.generate(PROMPT, SamplingParams(max_tokens=150), "s"))
    await asyncio.sleep(0.01)
    with pytest.raises(SessionError, match="session 's' has a turn in flight"):
        await model_engine.generate(PROMPT, SamplingParams(max_tokens=1), "s")
    assert len((await first).token_ids) == 150


async def test_closing_twice_is_fine(any_engine: Any) -> None:
    await any_engine.aclose()
    await any_engine.aclose()
