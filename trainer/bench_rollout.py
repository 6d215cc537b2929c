"""The `torch` engine on multi-turn sessions, beside vLLM (where it is installed) and Hugging Face ``generate``."""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from agentgym.generation import Generator, SamplingParams
from agentgym.settings import VllmConfig
from agentgym.trainer.rollout.torch_engine import TorchEngine
from agentgym.trainer.rollout.vllm_engine import VllmEngine
from agentgym.trainer.rollout.vllm_setup import EngineOptions
from agentgym.trainer.threads import one_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkload:
    """What is played: GRPO-like sessions whose tool results are given. Lengths in tokens.

    Every turn has exactly ``turn_tokens`` new tokens, so that ``generate`` wastes nothing on rows that end early.
    """

    sessions: int = 64
    samples: int = 8
    """Sessions with the same question."""
    turns: int = 3
    turn_tokens: int = 60
    system_tokens: int = 90
    """Begins every prompt."""
    question_tokens: tuple[int, int] = (16, 40)
    """Shortest and longest."""
    result_tokens: tuple[int, int] = (8, 24)
    """Shortest and longest tool result, added after each turn."""
    seed: int = 0

    @property
    def max_length(self) -> int:
        """The longest sequence that can occur."""
        turns = self.turns * (self.turn_tokens + self.result_tokens[1])
        return self.system_tokens + self.question_tokens[1] + turns

    def prompts(self, vocabulary: int, number: int = 0) -> list[list[int]]:
        """The first prompt of each session; others for another number."""
        rng = np.random.default_rng([self.seed, number])
        system = rng.integers(0, vocabulary, self.system_tokens).tolist()
        questions = [
            rng.integers(0, vocabulary, rng.integers(*self.question_tokens)).tolist()
            for _ in range(-(-self.sessions // self.samples))
        ]
        return [system + questions[i // self.samples] for i in range(self.sessions)]

    def result(self, session: int, turn: int, vocabulary: int) -> list[int]:
        """The tool result after a turn of a session."""
        rng = np.random.default_rng([self.seed, session, turn])
        ids: list[int] = rng.integers(0, vocabulary, rng.integers(*self.result_tokens)).tolist()
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One session's part of a turn."""

    ids: list[int]
    seconds: float
    """From the request of all sessions to this answer."""
    cached: int = 0
    """Tokens of the history that were not computed again."""


Sample = Callable[[list[list[int]], int, int], Awaitable[list[Answer]]]
"""One turn of all sessions: histories, turn number and new tokens in, an answer of each out."""


@dataclass(slots=True)
class Pass:
    """One time through the workload."""

    seconds: list[float]
    """Of each turn, from the first request to the last answer of all sessions."""
    first_token: float
    """Mean seconds to a single token after the last turn, all sessions at once."""
    cached: list[float]
    """Of each turn: share of the tokens of all histories that were not computed again."""


def bench_rollout(
    model: Any,
    *,
    workload: RolloutWorkload | None = None,
    passes: int = 5,
    num_threads: int | None = None,
    vllm_folder: str | None = None,
) -> dict[str, Any]:
    """Play the workload with each engine and with ``generate``, in alternating passes, after one to warm up.

    ``generate`` gets the whole history of each session, left-padded, at every turn, at the same temperature of 1, and
    is not asked for log-probs. Times are medians over the passes; compare the ratios, not the speeds.

    ``generate`` and vLLM have processes of their own: the helpers of one side's threads slow the other's otherwise.

    Args:
        model: a causal LM of transformers; it is not changed.
        workload: what is played; None: the default.
        passes: measured passes of each side.
        num_threads: intra-op threads of each; None: torch's setting.
        vllm_folder: the same model as a folder with a tokenizer, for vLLM on the CPU; None: without vLLM.

    Returns:
        ``rows``: one dict per engine and kind of turn with ``engine``, ``turns`` ("first", "later", "all"),
        ``tokens_per_s`` (new tokens), ``seconds``, ``cache_hits`` (share of the histories' tokens that were not
        computed again) and, for "all", ``first_token_s``; ``ratio``: how many times as fast as ``generate`` the `torch`
        engine is, for each kind; ``ratio_vllm``: the same over vLLM; ``workload``.
    """
    workload = workload if workload is not None else RolloutWorkload()
    threads = num_threads if num_threads is not None else torch.get_num_threads()
    with one_thread():
        measured = asyncio.run(_measure(model, workload, passes, threads, vllm_folder))
    return _report(workload, measured)


async def _measure(
    model: Any, workload: RolloutWorkload, passes: int, threads: int, vllm_folder: str | None
) -> dict[str, list[Pass]]:
    vocabulary = int(model.config.vocab_size)
    async with AsyncExitStack() as stack:
        engine = TorchEngine(
            copy.deepcopy(model), max_slots=workload.sessions, max_length=workload.max_length + 1, num_threads=threads
        )
        stack.push_async_callback(engine.aclose)
        samples = {"torch": _engine_turns(engine, workload)}
        engines: list[Generator] = [engine]
        if vllm_folder is not None:
            vllm = VllmEngine(
                EngineOptions(
                    model=vllm_folder,
                    max_slots=workload.sessions,
                    max_length=workload.max_length + 1,
                    threads=threads,
                    settings=VllmConfig(),
                )
            )
            stack.push_async_callback(vllm.aclose)
            await vllm.ready()
            samples["vllm"] = _engine_turns(vllm, workload)
            engines.append(vllm)
        alone = ProcessPoolExecutor(1, get_context("spawn"), _take_model, (model, threads))
        samples["generate"] = _generate_turns(stack.enter_context(alone))
        measured: dict[str, list[Pass]] = {name: [] for name in samples}
        for number in range(passes + 1):
            for name in sorted(samples, reverse=number % 2 == 1):
                # Other prompts in each pass: nothing of them is cached yet.
                played = await _play(workload, vocabulary, samples[name], number)
                if number:
                    measured[name].append(played)
                for session in range(workload.sessions):
                    for one in engines:
                        await one.release(str(session))
    return measured


async def _play(workload: RolloutWorkload, vocabulary: int, sample: Sample, number: int) -> Pass:
    histories = workload.prompts(vocabulary, number)
    seconds: list[float] = []
    cached: list[float] = []
    for turn in range(workload.turns):
        start = time.perf_counter()
        answers = await sample(histories, turn, workload.turn_tokens)
        seconds.append(time.perf_counter() - start)
        cached.append(sum(answer.cached for answer in answers) / sum(map(len, histories)))
        histories = [
            [*history, *answer.ids, *workload.result(i, turn, vocabulary)]
            for i, (history, answer) in enumerate(zip(histories, answers, strict=True))
        ]
    last = await sample(histories, workload.turns, 1)
    return Pass(seconds, statistics.fmean(answer.seconds for answer in last), cached)


def _engine_turns(engine: Generator, workload: RolloutWorkload) -> Sample:
    async def sample(histories: list[list[int]], turn: int, count: int) -> list[Answer]:
        start = time.perf_counter()

        async def answer(session: int, history: list[int]) -> Answer:
            params = SamplingParams(max_tokens=count, seed=turn * workload.sessions + session)
            generation = await engine.generate(history, params, str(session))
            seconds = time.perf_counter() - start
            return Answer(ids=list(generation.token_ids), seconds=seconds, cached=generation.cached_tokens)

        return list(await asyncio.gather(*(answer(i, history) for i, history in enumerate(histories))))

    return sample


def _generate_turns(process: Executor) -> Sample:
    async def sample(histories: list[list[int]], _turn: int, count: int) -> list[Answer]:
        start = time.perf_counter()
        answers = await asyncio.get_running_loop().run_in_executor(process, _generate, histories, count)
        seconds = time.perf_counter() - start
        return [Answer(ids=ids, seconds=seconds) for ids in answers]

    return sample


# In the process of ``generate``

_taken: list[Any] = []
"""The model, once it is there."""


def _take_model(model: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    _taken.append(model.eval())


def _generate(histories: list[list[int]], count: int) -> list[list[int]]:
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(history)) + history for history in histories])
    mask = torch.tensor([[0] * (width - len(history)) + [1] * len(history) for history in histories])
    with torch.inference_mode():
        output = _taken[0].generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=None,
        )
    new: list[list[int]] = output[:, width:].tolist()
    return new


def _report(workload: RolloutWorkload, measured: dict[str, list[Pass]]) -> dict[str, Any]:
    kinds = {"first": range(1), "later": range(1, workload.turns), "all": range(workload.turns)}
    rows: list[dict[str, Any]] = []
    seconds: dict[tuple[str, str], float] = {}
    for engine, passes in measured.items():
        for kind, turns in kinds.items():
            if not turns:
                continue
            took = seconds[engine, kind] = statistics.median(sum(one.seconds[t] for t in turns) for one in passes)
            row = {
                "engine": engine,
                "turns": kind,
                "tokens_per_s": workload.sessions * workload.turn_tokens * len(turns) / took,
                "seconds": took,
                "cache_hits": _mean_of(passes, turns),
            }
            if kind == "all":
                row["first_token_s"] = statistics.median(one.first_token for one in passes)
            rows.append(row)

    def ratio(other: str) -> dict[str, float]:
        return {kind: seconds[other, kind] / seconds["torch", kind] for kind, turns in kinds.items() if turns}

    report = {"workload": asdict(workload), "rows": rows, "ratio": ratio("generate")}
    return report | ({"ratio_vllm": ratio("vllm")} if "vllm" in measured else {})


def _mean_of(passes: Sequence[Pass], turns: range) -> float:
    return statistics.fmean(one.cached[turn] for one in passes for turn in turns)
