"""Exactness against the model itself, and what happens to requests when weights change or things go wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError, InfraError, SessionError
from agentgym.generation import Generation, SamplingParams
from agentgym.trainer.rollout import decoder
from agentgym.trainer.rollout.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
Llama = Callable[..., Any]

VOCABULARY = 300


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def full_logprobs(model: Any, prompt: Sequence[int], new: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of ``new`` after ``prompt`` in one plain forward."""
    ids = torch.tensor([[*prompt, *new]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()  # type: ignore[no-any-return]


def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What ``generate`` gives greedily."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


async def decoding(engine: TorchEngine) -> None:
    """Come back when the engine has made its first token."""
    while True:
        if engine.stats()["generated_tokens"]:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("slots", "shared"), [(3, False), (16, False), (16, True)])
async def test_multi_turn_sessions_equal_the_model_alone(
    make_engine: MakeEngine, llama: Llama, monkeypatch: pytest.MonkeyPatch, key_heads: int, slots: int, shared: bool
) -> None:
    """Mixed lengths, joins and leaves at any step, kept and evicted keys and values, shared prefixes."""
    if shared:
        monkeypatch.setattr(decoder, "MIN_SPARED_BYTES", 1)
    model = llama(key_heads)
    engine = make_engine(llama(key_heads), max_slots=slots)
    system = tokens(40, seed=0)

    async def play(session: int) -> None:
        rng = random.Random(session)
        history = system[: rng.choice([0, 17, 40])] + tokens(rng.randrange(1, 30), seed=session // 2)
        for turn in range(3):
            await asyncio.sleep(rng.random() * 0.02)
            temperature = rng.choice([0.0, 1.0, 0.7])
            sampling = SamplingParams(max_tokens=rng.randrange(1, 14), temperature=temperature, seed=session)
            generation = await engine.generate(history, sampling, f"s{session}")
            new = list(generation.token_ids)
            expected = full_logprobs(model, history, new, temperature or 1.0)
            assert generation.logprobs == pytest.approx(expected, abs=1e-4)
            if temperature == 0.0:
                assert new == generated(model, history, len(new))
            history = [*history, *new, *tokens(rng.randrange(1, 9), seed=100 * session + turn)]
        await engine.release(f"s{session}")

    await asyncio.gather(*(play(session) for session in range(12)))
    stats = engine.stats()
    assert stats["requests"] == 36
    assert (stats["evictions"] > 0) == (slots == 3)
    assert (stats["shared_steps"] > 0) == shared


async def test_the_next_turn_computes_only_what_is_new(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = await engine.generate(tokens(30, 1), SamplingParams(max_tokens=6, seed=1), "s")
    assert first.cached_tokens == 0
    history = [*tokens(30, 1), *first.token_ids, 7, 8]
    second = await engine.generate(history, SamplingParams(max_tokens=6, seed=1), "s")
    # The last sampled token never went through the model.
    assert second.cached_tokens == 35
    assert engine.stats()["prefill_tokens"] == 30 + 3


async def test_a_prompt_that_differs_keeps_what_is_equal(make_engine: MakeEngine, llama: Llama) -> None:
    engine, model = make_engine(), llama()
    first = await engine.generate(tokens(40, 1), SamplingParams(max_tokens=8, seed=1), "s")
    changed = [*tokens(40, 1), first.token_ids[0], (first.token_ids[1] + 1) % VOCABULARY, 3]
    for prompt, cached in ((changed, 41), (changed[:20], 19), (tokens(25, 2), 0)):
        generation = await engine.generate(prompt, SamplingParams(max_tokens=5, temperature=0.0), "s")
        assert generation.cached_tokens == cached
        assert list(generation.token_ids) == generated(model, prompt, 5)


async def test_equal_prompts_are_computed_once(make_engine: MakeEngine, llama: Llama) -> None:
    engine, model, prompt = make_engine(deterministic=True), llama(), tokens(50, 3)
    keys = [f"k{i}" for i in range(8)]
    engine.begin_batch(keys, 8)
    generations = await asyncio.gather(
        *(engine.generate(prompt, SamplingParams(max_tokens=6, seed=i), key) for i, key in enumerate(keys))
    )
    assert engine.stats()["prefill_tokens"] == 50
    assert [g.cached_tokens for g in generations] == [0, *[50] * 7]
    assert len({tuple(g.token_ids) for g in generations}) > 1
    for generation in generations:
        expected = full_logprobs(model, prompt, generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_common_system_prompt_is_computed_once(make_engine: MakeEngine, llama: Llama) -> None:
    engine, model, system = make_engine(deterministic=True), llama(), tokens(90, 4)
    keys = [f"k{i}" for i in range(6)]
    engine.begin_batch(keys, 6)
    prompts = [system + tokens(10 + i, seed=50 + i // 2) for i in range(6)]
    generations = await asyncio.gather(
        *(
            engine.generate(p, SamplingParams(max_tokens=4, temperature=0.0), k)
            for k, p in zip(keys, prompts, strict=True)
        )
    )
    assert engine.stats()["prefill_tokens"] == 90 + sum(10 + i for i in range(6))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == generated(model, prompt, 4)


async def test_long_prompts_are_computed_in_pieces(make_engine: MakeEngine, llama: Llama, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentgym.trainer.rollout.decoder.CHUNK", 32)
    engine, model = make_engine(), llama()
    prompts = [tokens(count, seed=count) for count in (100, 33, 64, 5)]
    generations = await asyncio.gather(
        *(engine.generate(p, SamplingParams(max_tokens=3, temperature=0.0), str(len(p))) for p in prompts)
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == generated(model, prompt, 3)


async def test_nothing_is_generated_past_the_longest_length(make_engine: MakeEngine, llama: Llama) -> None:  # B11
    engine, prompt = make_engine(max_length=40), tokens(37, 1)
    generation = await engine.generate(prompt, SamplingParams(max_tokens=100, temperature=0.0), "s")
    assert generation.finish_reason == "length"
    assert list(generation.token_ids) == generated(llama(), prompt, 3)
    assert len((await engine.generate(tokens(39, 1), SamplingParams(max_tokens=9), "t")).token_ids) == 1
    with pytest.raises(ConfigError, match="a prompt of 40 tokens leaves no room for another in max_length=40"):
        await engine.generate(tokens(40, 1), SamplingParams(max_tokens=1), "u")


async def test_same_seed_same_tokens_other_seed_other_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def ids(seed: int | None, session: str) -> list[int]:
        generation = await engine.generate(tokens(20, 1), SamplingParams(max_tokens=12, seed=seed), session)
        return list(generation.token_ids)

    assert await ids(5, "a") == await ids(5, "b")
    assert await ids(5, "c") != await ids(6, "d")
    assert await ids(None, "e") != await ids(None, "f")


async def test_truncated_sampling_reports_the_truncated_distribution(make_engine: MakeEngine, llama: Llama) -> None:
    engine, model, prompt = make_engine(), llama(), tokens(20, 2)
    sampling = SamplingParams(max_tokens=8, temperature=1.3, top_k=3, seed=1)
    generation = await engine.generate(prompt, sampling, "s")
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 1.3
    for step, (token, logprob) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
        best = logits[step].topk(3)
        assert token in best.indices.tolist()
        expected = best.values.log_softmax(-1)[best.indices.tolist().index(token)]
        assert logprob == pytest.approx(float(expected), abs=1e-4)


# Weights


async def test_an_update_is_atomic_and_forgets_what_older_weights_made(
    make_engine: MakeEngine, llama: Llama
) -> None:  # H4
    old, new = llama(seed=0), llama(seed=1)
    engine = make_engine(llama(seed=0))
    prompt = tokens(30, 1)
    before = await engine.generate(prompt, SamplingParams(max_tokens=5, seed=1), "s")
    assert (before.weight_version, engine.version) == (0, 0)
    running = asyncio.create_task(engine.generate(tokens(10, 9), SamplingParams(max_tokens=60, seed=2), "r"))
    await asyncio.sleep(0.01)
    update = asyncio.create_task(engine.update_weights(new.state_dict(), 3))
    await asyncio.sleep(0)
    # Asked for during the update: served by the new weights.
    after = await engine.generate([*prompt, *before.token_ids, 4], SamplingParams(max_tokens=5, seed=1), "s")
    await update
    in_flight = await running
    assert (in_flight.weight_version, after.weight_version, engine.version) == (0, 3, 3)
    assert after.cached_tokens == 0
    assert in_flight.logprobs == pytest.approx(full_logprobs(old, tokens(10, 9), in_flight.token_ids), abs=1e-4)
    expected = full_logprobs(new, [*prompt, *before.token_ids, 4], after.token_ids)
    assert after.logprobs == pytest.approx(expected, abs=1e-4)


async def test_weights_are_copied(make_engine: MakeEngine, llama: Llama) -> None:
    engine, other = make_engine(), llama(seed=1)
    weights = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    await engine.update_weights(weights, 1)
    for tensor in weights.values():
        tensor.zero_()
    generation = await engine.generate(tokens(20, 1), SamplingParams(max_tokens=5, temperature=0.0), "s")
    assert list(generation.token_ids) == generated(other, tokens(20, 1), 5)


async def test_weights_that_do_not_fit_change_nothing(make_engine: MakeEngine, llama: Llama) -> None:
    engine = make_engine()
    weights = dict(llama(seed=1).state_dict())
    with pytest.raises(ConfigError, match=r"1 unknown names \['extra'\]"):
        await engine.update_weights(weights | {"extra": torch.zeros(1)}, 1)
    with pytest.raises(ConfigError, match=r"'model.norm.weight' has shape \(3,\), expected \(32,\)"):
        await engine.update_weights(weights | {"model.norm.weight": torch.zeros(3)}, 1)
    del weights["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"1 missing \['model.norm.weight'\]"):
        await engine.update_weights(weights, 1)
    generation = await engine.generate(tokens(20, 1), SamplingParams(max_tokens=5, temperature=0.0), "s")
    assert generation.weight_version == 0
    assert list(generation.token_ids) == generated(llama(), tokens(20, 1), 5)


async def test_tied_weights_may_be_left_out(make_engine: MakeEngine, llama: Llama) -> None:
    engine, other = make_engine(), llama(seed=1)
    weights = dict(other.state_dict())
    del weights["lm_head.weight"]
    await engine.update_weights(weights, 1)
    generation = await engine.generate(tokens(20, 1), SamplingParams(max_tokens=5, temperature=0.0), "s")
    assert list(generation.token_ids) == generated(other, tokens(20, 1), 5)


# Requests that are wrong, cancelled, or cut off


async def test_wrong_prompts_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt, message in (([], "the prompt is empty"), ([1, VOCABULARY], "ids from 1 to 300"), ([-1], "from -1")):
        with pytest.raises(ConfigError, match=message):
            await engine.generate(prompt, SamplingParams(max_tokens=1), "s")


async def test_stop_strings_need_a_tokenizer(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="need TorchEngine\\(tokenizer="):
        await make_engine(tokenizer=None).generate([1], SamplingParams(max_tokens=1, stop=["x"]), "s")
    with pytest.raises(ConfigError, match="an empty stop string"):
        await make_engine().generate([1], SamplingParams(max_tokens=1, stop=[""]), "s")


async def test_a_session_has_one_turn_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = asyncio.create_task(engine.generate(tokens(9, 1), SamplingParams(max_tokens=50), "s"))
    await asyncio.sleep(0)
    with pytest.raises(SessionError, match="session 's' has a turn in flight"):
        await engine.generate(tokens(9, 1), SamplingParams(max_tokens=1), "s")
    assert len((await first).token_ids) == 50


async def test_a_cancelled_turn_frees_its_row(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1)
    running = asyncio.create_task(engine.generate(tokens(9, 1), SamplingParams(max_tokens=240), "a"))
    waiting = asyncio.create_task(engine.generate(tokens(9, 2), SamplingParams(max_tokens=240), "b"))
    await decoding(engine)
    waiting.cancel()
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    generation = await engine.generate(tokens(9, 1), SamplingParams(max_tokens=4), "a")
    assert generation.cached_tokens == 0
    assert engine.stats()["generated_tokens"] < 240


async def test_a_session_released_during_its_turn_is_forgotten_after_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    running = asyncio.create_task(engine.generate(tokens(20, 1), SamplingParams(max_tokens=30), "s"))
    await decoding(engine)
    await engine.release("s")
    generation = await running
    assert len(generation.token_ids) == 30
    again = await engine.generate([*tokens(20, 1), *generation.token_ids], SamplingParams(max_tokens=1), "s")
    assert again.cached_tokens == 0


async def test_a_fault_fails_everyone_who_waits_and_the_engine_goes_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_that_can_fail(monkeypatch)
    engine = make_engine(model, max_slots=2)
    model.broken = True
    sampling = SamplingParams(max_tokens=5)
    results = await asyncio.gather(
        *(engine.generate(tokens(9, i), sampling, f"s{i}") for i in range(5)), return_exceptions=True
    )
    assert all(isinstance(r, InfraError) and "the memory burst" in str(r) for r in results)
    model.broken = False
    assert len((await engine.generate(tokens(9, 1), sampling, "s1")).token_ids) == 5


def make_model_that_can_fail(monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Fragile(LlamaForCausalLM):  # type: ignore[misc]
        broken = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.broken:
                raise RuntimeError("the memory burst")
            return super().forward(*args, **kwargs)

    return Fragile(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )


async def test_broken_weights_are_a_fault_not_a_turn(make_engine: MakeEngine, llama: Llama) -> None:
    engine = make_engine()
    weights = {name: torch.full_like(t, float("nan")) for name, t in llama().state_dict().items()}
    await engine.update_weights(weights, 1)
    with pytest.raises(InfraError, match="logits are not finite \\(weight version 1, session 's', token 0\\)"):
        await engine.generate(tokens(20, 1), SamplingParams(max_tokens=5), "s")
    await engine.update_weights(llama().state_dict(), 2)
    generation = await engine.generate(tokens(20, 1), SamplingParams(max_tokens=5, temperature=0.0), "s")
    assert list(generation.token_ids) == generated(llama(), tokens(20, 1), 5)


async def test_closing_fails_who_waits_and_who_comes_later(make_engine: MakeEngine, llama: Llama) -> None:
    engine = make_engine(max_slots=1)
    waiting = [
        asyncio.create_task(engine.generate(tokens(9, i), SamplingParams(max_tokens=240), f"s{i}")) for i in range(3)
    ]
    await asyncio.sleep(0)
    await engine.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, InfraError) and "closed" in str(r) for r in results)
    with pytest.raises(InfraError, match="closed"):
        await engine.generate([1], SamplingParams(max_tokens=1), "s")
    with pytest.raises(InfraError, match="closed"):
        await engine.update_weights(llama().state_dict(), 1)
    await engine.release("s")


def test_an_engine_outlives_an_event_loop(llama: Llama) -> None:
    engine = TorchEngine(llama(), max_slots=2, max_length=64, num_threads=1)

    async def turn(history: list[int]) -> Generation:
        abandoned = asyncio.create_task(engine.generate(tokens(5, 1), SamplingParams(max_tokens=50), "gone"))
        await asyncio.sleep(0)
        generation = await engine.generate(history, SamplingParams(max_tokens=3, temperature=0.0), "s")
        assert not abandoned.cancelled()
        return generation

    first = asyncio.run(turn(tokens(20, 1)))
    second = asyncio.run(turn([*tokens(20, 1), *first.token_ids]))
    assert second.cached_tokens == 22
    asyncio.run(engine.aclose())


async def test_the_event_loop_runs_while_tokens_are_made(make_engine: MakeEngine) -> None:
    engine = make_engine()
    task = asyncio.create_task(engine.generate(tokens(9, 1), SamplingParams(max_tokens=200), "s"))
    seen = set()
    while not task.done():
        seen.add(engine.stats()["generated_tokens"])
        await asyncio.sleep(0)
    assert len(seen) > 20
