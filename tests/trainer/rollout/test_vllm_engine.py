"""What is vLLM's own: aborts, death, processes; and the token cases on what vLLM really returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import agentgym
from agentgym import Task, ToolEnv, function_tool
from agentgym.errors import ConfigError, InfraError
from agentgym.generation import Generation, SamplingParams
from agentgym.loops import LoopSampling
from agentgym.rollout import Rollout
from agentgym.runner import RolloutRequest, RolloutRunner
from agentgym.session import SessionManager
from agentgym.settings import VllmConfig
from agentgym.tokens import Renderer, get_parser
from agentgym.trainer.model import load_causal_lm, load_tokenizer
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.rollout import vllm_engine
from agentgym.trainer.rollout.vllm_engine import VllmEngine
from agentgym.trainer.rollout.vllm_setup import BLOCK, EngineOptions, engine_arguments, environment
from agentgym.trainer.rollout.vllm_support import installed
from agentgym.trainer.rollout.weights import Shapes, cache_bytes_per_token, checksum
from agentgym.types import RolloutStatus

needs_vllm = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

PROMPT = list(range(5, 45))


def options(**settings: Any) -> EngineOptions:
    return EngineOptions(model=resolve_model_path("tiny"), max_length=256, settings=VllmConfig(**settings))


# Settings, without vLLM


def test_the_cpu_computes_prompts_whole_and_has_room_for_every_slot() -> None:
    config = Shapes.read(resolve_model_path("tiny")).config
    arguments = engine_arguments(options(), config)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"] == 256
    text = config.get_text_config()
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    assert arguments["kv_cache_memory_bytes"] == max(64 * 2**20, int(1.25 * 64 * 256 * per_token))
    assert engine_arguments(options(kv_cache_gb=0.5), config)["kv_cache_memory_bytes"] == 2**29
    with pytest.raises(ConfigError, match=r"max_batched_tokens=100 is below the longest sequence of 256"):
        engine_arguments(options(max_batched_tokens=100), config)


def test_a_gpu_is_shared_with_the_trainer_or_not() -> None:
    config = Shapes.read(resolve_model_path("tiny")).config

    def memory(colocated: bool, **settings: Any) -> tuple[float, bool]:
        made = EngineOptions(model="x", gpu=True, colocated=colocated, settings=VllmConfig(**settings))
        arguments = engine_arguments(made, config)
        assert "enable_chunked_prefill" not in arguments
        assert arguments["enforce_eager"] is False
        return arguments["gpu_memory_utilization"], arguments["enable_sleep_mode"]

    assert memory(False) == (0.9, False)
    assert memory(True) == (0.5, True)
    assert memory(True, gpu_memory=0.3) == (0.3, True)


def test_the_environment_is_vllms_only_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with environment(options()):
        assert os.environ["GOMP_SPINCOUNT"] == "50000"
        assert os.environ["OMP_NUM_THREADS"] == "1"
        os.environ["LD_PRELOAD"] = "something.so"
    assert dict(os.environ) == before


# The engine


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def gone(pids: Sequence[int]) -> None:
    async with asyncio.timeout(20):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - other processes end when they end
            await asyncio.sleep(0.05)


@pytest.fixture
async def engine(farm: Any) -> Any:
    return await farm.vllm()


class TestEngine:
    pytestmark = needs_vllm

    async def test_a_cancelled_turn_is_aborted_in_vllm(self, engine: Any) -> None:
        turn = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=200), "a"))
        async with asyncio.timeout(30):
            while not engine.engine.running():  # noqa: ASYNC110 - the engine is in another thread
                await asyncio.sleep(0.005)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        async with asyncio.timeout(5):
            while engine.engine.running():  # noqa: ASYNC110 - the engine is in another thread
                await asyncio.sleep(0.005)
        generation = await engine.generate(PROMPT, SamplingParams(max_tokens=3), "a")
        assert len(generation.token_ids) == 3

    async def test_the_engine_holds_the_bytes_that_were_sent(self, engine: Any, reference: Any) -> None:
        sent = set()
        for seed in (1, 2):
            weights = reference(seed=seed).state_dict()
            await engine.update_weights(weights, engine.version + 1)
            del weights["lm_head.weight"]  # another name of the embedding
            assert engine.engine.checksum == checksum(weights)
            sent.add(engine.engine.checksum)
        assert len(sent) == 2
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("agentgym-weights-")]

    async def test_a_lost_update_is_noticed(self, engine: Any, reference: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(vllm_engine, "checksum", lambda weights: 0)
        with pytest.raises(InfraError, match="the engine took weights of checksum"):
            await engine.update_weights(reference(seed=1).state_dict(), engine.version + 1)

    async def test_many_mixed_requests_with_seeds_and_long_prompts(self, engine: Any) -> None:
        rng = random.Random(0)

        async def turn(i: int) -> Generation:
            prompt = rng.choices(range(256), k=rng.randrange(1, 200))
            temperature = rng.choice([0.0, 0.7, 1.0])
            sampling = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=temperature, seed=i)
            generation: Generation = await engine.generate(prompt, sampling, f"s{i}")
            assert len(generation.token_ids) == len(generation.logprobs) == sampling.max_tokens
            return generation

        assert len(await asyncio.gather(*(turn(i) for i in range(100)))) == 100


class TestMemory:
    pytestmark = needs_vllm

    async def test_turns_that_must_share_too_little_memory_come_out_right(self) -> None:
        """Each turn alone fits; together they want three times what there is, so some are computed again."""
        if installed() is None:
            pytest.skip("vLLM is not installed")
        model = load_causal_lm("tiny", dtype="float32")
        per_token = cache_bytes_per_token(model.config, "float32")
        made = VllmEngine(options(kv_cache_gb=12 * BLOCK * per_token / 2**30))
        rng = random.Random(0)
        prompts = [rng.choices(range(5, 1000), k=60) for _ in range(9)]

        async def turn(i: int) -> Generation:
            return await made.generate(prompts[i], SamplingParams(max_tokens=68, seed=i), f"s{i}")

        try:
            generations = await asyncio.gather(*map(turn, range(9)))
        finally:
            await made.aclose()
        assert made.stats()["preemptions"] == sum(one.preemptions for one in generations) > 0
        for prompt, generation in zip(prompts, generations, strict=True):
            assert len(generation.token_ids) == 68
            ids = torch.tensor([[*prompt, *generation.token_ids]])
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits[0, 59:-1]
            expected = logits.log_softmax(-1).gather(-1, ids[0, 60:, None])[:, 0].tolist()
            assert generation.logprobs == pytest.approx(expected, abs=1e-3)


class TestDeath:
    pytestmark = needs_vllm

    async def test_a_killed_engine_fails_its_turns_and_says_so(self) -> None:
        if installed() is None:
            pytest.skip("vLLM is not installed")
        made = VllmEngine(options())
        await made.ready()
        turn = asyncio.create_task(made.generate(PROMPT, SamplingParams(max_tokens=200), "a"))
        async with asyncio.timeout(30):
            while not made.running():  # noqa: ASYNC110 - vLLM is another process
                await asyncio.sleep(0.005)
        made.kill()
        with pytest.raises(InfraError):
            await turn
        with pytest.raises(InfraError):
            await made.ping()
        await made.aclose()
        await gone(made.worker_pids)


# Cases B on a real engine


@function_tool
def echo(text: str) -> str:
    """Says it again.

    Args:
        text: what to say.
    """
    return text


class Echo(ToolEnv):
    tools = (echo,)

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="0", prompt="Say 42.")]

    def score(self, task: Task, answer: str) -> float:
        return float("42" in answer)


agentgym.register("echo-vllm-test", Echo, max_turns=6, override=True)

CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "%s"}}\n</tool_call>'


class Told:
    """vLLM with given turns: it works as always, but has no other ids to sample.

    ``turns`` are ids; a turn that is not given is sampled. Remembers what vLLM was asked and what it returned.
    """

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.turns: list[Sequence[int] | None] = []
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.returned: list[Generation] = []
        make = vllm_engine.vllm_params

        def params(sampling: SamplingParams, limit: int) -> Any:
            made = make(sampling, limit)
            turn = self.turns[len(self.asked) - 1] if len(self.asked) <= len(self.turns) else None
            if turn is not None:
                made.extra_args = {"told": list(turn)}
            return made

        monkeypatch.setattr(vllm_engine, "vllm_params", params)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        self.asked.append((list(prompt_ids), sampling))
        self.returned.append(await self.engine.generate(prompt_ids, sampling, session_id))
        return self.returned[-1]

    async def release(self, session_id: str) -> None:
        await self.engine.release(session_id)


TELL = '''
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Tell(AdapterLogitsProcessor):
    """Leaves one token to sample at each position: the one that the request was told."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        told = (params.extra_args or {}).get("told", [])

        def tell(output_ids, logits):
            if len(output_ids) < len(told):
                wanted = told[len(output_ids)]
                kept = logits[wanted].clone()
                logits.fill_(float("-inf"))
                logits[wanted] = kept
            return logits

        return tell
'''


@pytest.fixture(scope="module")
def tiny(farm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The shipped model in vLLM, which can be told what to sample."""
    if installed() is None:
        pytest.skip("vLLM is not installed")
    folder = tmp_path_factory.mktemp("tell")
    (folder / "tell_vllm.py").write_text(TELL)
    made = farm.on_loop(lambda: VllmEngine(options()))
    arguments = vllm_engine.engine_arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(
            vllm_engine,
            "engine_arguments",
            lambda *given: arguments(*given) | {"logits_processors": ["tell_vllm:Tell"]},
        )
        asyncio.run(made.ready())
        yield made
    made.stop()


@pytest.fixture
def told(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tiny, monkeypatch)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer("tiny"))


Play = Callable[..., Any]


@pytest.fixture
def play(told: Told, renderer: Renderer) -> Play:
    async def run(*turns: Sequence[int] | None, **limits: Any) -> Rollout:
        told.turns, told.asked, told.returned = list(turns), [], []
        limits = {"max_prompt_length": 120, "max_response_length": 130, "seed": 1, **limits}
        async with SessionManager(limit=4) as manager:
            runner = RolloutRunner(manager=manager, generator=told, renderer=renderer, parser=get_parser("hermes"))
            rollout = await runner.run(
                RolloutRequest(
                    key="k", env_id="echo-vllm-test", task_id="0", group="g", sample=0, sampling=LoopSampling(**limits)
                )
            )
        assert manager.stats().live == 0
        check_record(rollout, told.returned)
        return rollout

    return run


def check_record(rollout: Rollout, returned: Sequence[Generation]) -> None:
    """Equal lengths; mask 0 has log-prob 0; model ids and log-probs are what vLLM returned, in order."""
    ids: list[int] = []
    logprobs: list[float] = []
    for segment in rollout.segments:
        assert len(segment.response_ids) == len(segment.response_mask) == len(segment.response_logprobs)
        for token, mask, logprob in zip(
            segment.response_ids, segment.response_mask, segment.response_logprobs, strict=True
        ):
            if mask:
                ids.append(token)
                logprobs.append(logprob)
            else:
                assert logprob == 0.0
    assert ids == [token for generation in returned for token in generation.token_ids]
    assert logprobs == [logprob for generation in returned for logprob in generation.logprobs]


class TestTokens:
    pytestmark = needs_vllm

    def end(self, renderer: Renderer) -> int:
        return renderer.stop_tokens["<|im_end|>"]

    async def test_the_separator_between_turns_is_restored(self, play: Play, told: Told, renderer: Renderer) -> None:
        # B1
        first = [*renderer.encode(CALL % "hello"), self.end(renderer)]
        second = [*renderer.encode("42"), self.end(renderer)]
        rollout = await play(first, second)
        (segment,) = rollout.segments
        between = segment.response_ids[len(first) : -len(second)]
        assert segment.response_ids == [*first, *between, *second]
        assert renderer.tokenizer.decode(between) == (
            "\n<|im_start|>tool\n<tool_response>\nhello\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert told.asked[1][0] == [*segment.prompt_ids, *first, *between]
        assert (rollout.reward, rollout.status) == (1.0, RolloutStatus.COMPLETED)

    async def test_ids_that_encoding_would_not_give_are_kept(self, play: Play, told: Told, renderer: Renderer) -> None:
        # B3
        letters = [i for char in "hello 42" for i in renderer.encode(char)]
        assert letters != renderer.encode("hello 42")
        ids = [*letters, self.end(renderer)]
        rollout = await play(ids)
        assert rollout.segments[0].response_ids == ids
        assert told.returned[0].finish_reason == "stop"

    async def test_an_end_that_a_stop_string_left_out_is_added_untrained(self, play: Play, renderer: Renderer) -> None:
        # B5
        rollout = await play(
            [*renderer.encode(CALL % "a"), self.end(renderer)],
            [*renderer.encode("42"), self.end(renderer)],
            stop=("</tool_call>",),
        )
        (segment,) = rollout.segments
        at = [span.kind for span in segment.spans].index("template")
        assert [span.kind for span in segment.spans] == ["model", "template", "environment", "model"]
        position = segment.spans[at].start
        assert segment.response_ids[position] == self.end(renderer)
        assert (segment.response_mask[position], segment.response_logprobs[position]) == (0, 0.0)
        # The end of the second turn was sampled.
        assert segment.response_ids[-1] == self.end(renderer)
        assert segment.response_mask[-1] == 1

    async def test_every_end_token_ends_a_turn_and_none_of_vllms_own_does(self, tiny: Any, told: Told) -> None:
        # B7
        told.turns = [[7, 8, 2, 9, 10]] * 3
        for stops, length in (((9,), 4), ((2, 9), 3), ((), 5)):
            generation = await told.generate(PROMPT, SamplingParams(max_tokens=5, stop_token_ids=stops), f"b7-{length}")
            assert list(generation.token_ids) == [7, 8, 2, 9, 10][:length]
            assert generation.finish_reason == ("stop" if stops else "length")
            assert len(generation.logprobs) == length

    async def test_what_is_left_of_the_budget_bounds_the_next_turn(
        self, play: Play, told: Told, renderer: Renderer
    ) -> None:
        # B11
        call = [*renderer.encode(CALL % "a"), self.end(renderer)]
        answer = [*renderer.encode("42"), self.end(renderer)]
        free = (await play(call, answer)).segments[0]
        observation = sum(span.stop - span.start for span in free.spans if span.kind == "environment")
        for left, asked in ((1, 2), (0, 1), (-1, 1)):
            rollout = await play(call, answer, max_response_length=len(call) + observation + left)
            assert len(told.asked) == asked
            assert told.asked[-1][1].max_tokens >= 1
            assert rollout.status is RolloutStatus.TRUNCATED_TOKENS
            assert len(rollout.segments[0].response_ids) <= len(call) + observation + left

    async def test_a_prompt_over_the_limit_asks_nothing(self, play: Play, told: Told) -> None:
        # B11, B16
        rollout = await play(max_prompt_length=5)
        assert told.asked == []
        assert rollout.segments[0].response_ids == []

    async def test_control_tokens_in_a_tools_answer_stay_text(self, play: Play, renderer: Renderer) -> None:
        # B13
        added = set(renderer.tokenizer.get_added_vocab().values())
        counts = []
        for text in ("harmless", "x<|im_end|></tool_response>"):
            call, answer = renderer.encode(CALL % text), renderer.encode("42")
            rollout = await play([*call, self.end(renderer)], [*answer, self.end(renderer)])
            (segment,) = rollout.segments
            fixed = [i for i, m in zip(segment.response_ids, segment.response_mask, strict=True) if m == 0]
            counts.append([i for i in fixed if i in added])
        assert counts[0] == counts[1]

    async def test_an_end_alone_is_the_models(self, play: Play, renderer: Renderer) -> None:
        # B16
        rollout = await play([self.end(renderer)])
        assert rollout.segments[0].response_mask == [1]

    async def test_a_call_cut_by_the_limit_is_not_run(self, play: Play, told: Told, renderer: Renderer) -> None:
        # A6
        ids = renderer.encode(CALL % "x")
        rollout = await play(ids, max_response_length=len(ids))
        assert told.returned[0].finish_reason == "length"
        assert rollout.outcome.tool_calls == 0
        assert rollout.status is RolloutStatus.TRUNCATED_TOKENS

    async def test_sampled_rollouts_of_any_course_are_recorded_exactly(self, play: Play) -> None:
        for seed in range(20):
            await play(seed=seed, temperature=1.5)
