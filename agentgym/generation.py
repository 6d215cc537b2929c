"""The only thing an agent loop knows of an engine: prompt ids in, sampled ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentgym.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is sampled. ``temperature=0`` is greedy (validation and evaluation only)."""

    max_tokens: int
    """At least 1: the loop never asks for less."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after one of these; it is part of the returned ids."""
    stop: Sequence[str] = ()
    """Generation ends when the decoded text contains one of these."""
    seed: int | None = None
    """Noise for position t of this request depends on (seed, t) alone, not on what else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled turn. ``token_ids`` and ``logprobs`` are of equal length, possibly empty."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the sampled distribution (after temperature), natural log."""
    finish_reason: FinishReason
    weight_version: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""
    preemptions: int = 0
    """How often the engine took this turn's memory for another and computed its tokens again: it has too little."""


class Generator(Protocol):
    """What every engine offers to a loop. Raises `agentgym.errors.InfraError` when the engine is lost."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """Sample one turn after ``prompt_ids`` (the whole history). Cancelling the call aborts the request."""
        ...

    async def release(self, session_id: str) -> None:
        """Forget what is kept for the session (its KV cache). Idempotent; unknown ids are fine."""
        ...
