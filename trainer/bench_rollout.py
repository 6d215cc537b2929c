"""Tokens per second of the `torch` engine on multi-turn sessions, beside Hugging Face ``generate`` on the same."""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from agentgym.generation import SamplingParams
from agentgym.trainer.rollout.torch_engine import TorchEngine


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

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The first prompt of each session."""
        rng = np.random.default_rng(self.seed)
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


Sample = Callable[[list[list[int]], int], Awaitable[list[list[int]]]]
"""One turn of all sessions: histories and turn number in, the new tokens of each out."""


def bench_rollout(
    model: Any, *, workload: RolloutWorkload | None = None, passes: int = 5, num_threads: int | None = None
) -> dict[str, Any]:
    """Play the workload with the engine and with ``generate``, in alternating passes, after one to warm up.

    ``generate`` gets the whole history of each session, left-padded, at every turn, at the same temperature of 1, and
    is not asked for log-probs. Times are medians over the passes; compare the ratios, not the speeds.

    Args:
        model: a causal LM of transformers; it is not changed.
        workload: what is played; None: the default.
        passes: measured passes of each side.
        num_threads: intra-op threads of both; None: torch's setting.

    Returns:
        ``rows``: one dict per engine and kind of turn with ``engine``, ``turns`` ("first", "later"), ``tokens_per_s``
        (new tokens), ``seconds``; ``ratio``: engine over ``generate`` for "first", "later" and "all"; ``workload``.
    """
    workload = workload if workload is not None else RolloutWorkload()
    threads = num_threads if num_threads is not None else torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = asyncio.run(_measure(model, workload, passes, threads))
    finally:
        torch.set_num_threads(before)
    return _report(workload, times)


async def _measure(model: Any, workload: RolloutWorkload, passes: int, threads: int) -> dict[str, list[list[float]]]:
    engine = TorchEngine(
        copy.deepcopy(model), max_slots=workload.sessions, max_length=workload.max_length, num_threads=threads
    )
    vocabulary = int(model.config.vocab_size)
    reference = copy.deepcopy(model).to(engine.device).eval()
    times: dict[str, list[list[float]]] = {"torch": [], "generate": []}
    try:
        for number in range(passes + 1):
            for name in ("torch", "generate") if number % 2 else ("generate", "torch"):
                sample = _engine_turns(engine, workload) if name == "torch" else _generate_turns(reference, workload)
                seconds = await _play(workload, vocabulary, sample)
                if number:
                    times[name].append(seconds)
                for session in range(workload.sessions):
                    await engine.release(str(session))
    finally:
        await engine.aclose()
    return times


async def _play(workload: RolloutWorkload, vocabulary: int, sample: Sample) -> list[float]:
    """Seconds of each turn, from the first request to the last answer of all sessions."""
    histories = workload.prompts(vocabulary)
    seconds = []
    for turn in range(workload.turns):
        start = time.perf_counter()
        new = await sample(histories, turn)
        seconds.append(time.perf_counter() - start)
        histories = [
            [*history, *ids, *workload.result(i, turn, vocabulary)]
            for i, (history, ids) in enumerate(zip(histories, new, strict=True))
        ]
    return seconds


def _engine_turns(engine: TorchEngine, workload: RolloutWorkload) -> Sample:
    async def sample(histories: list[list[int]], turn: int) -> list[list[int]]:
        generations = await asyncio.gather(
            *(
                engine.generate(
                    history,
                    SamplingParams(max_tokens=workload.turn_tokens, seed=turn * workload.sessions + session),
                    str(session),
                )
                for session, history in enumerate(histories)
            )
        )
        return [list(generation.token_ids) for generation in generations]

    return sample


def _generate_turns(model: Any, workload: RolloutWorkload) -> Sample:
    async def sample(histories: list[list[int]], _turn: int) -> list[list[int]]:
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(history)) + history for history in histories], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(history)) + [1] * len(history) for history in histories], device=model.device
        )
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=workload.turn_tokens,
                min_new_tokens=workload.turn_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                eos_token_id=None,
            )
        new: list[list[int]] = output[:, width:].tolist()
        return new

    return sample


def _report(workload: RolloutWorkload, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    kinds = {"first": range(1), "later": range(1, workload.turns), "all": range(workload.turns)}
    seconds = {
        (engine, kind): statistics.median(sum(one[turn] for turn in turns) for one in measured)
        for engine, measured in times.items()
        for kind, turns in kinds.items()
        if turns
    }
    rows = [
        {
            "engine": engine,
            "turns": kind,
            "tokens_per_s": workload.sessions * workload.turn_tokens * len(kinds[kind]) / took,
            "seconds": took,
        }
        for (engine, kind), took in seconds.items()
    ]
    ratio = {kind: seconds["generate", kind] / seconds["torch", kind] for kind, turns in kinds.items() if turns}
    return {"workload": asdict(workload), "rows": rows, "ratio": ratio}
