"""What every engine of requests counts."""

from __future__ import annotations

from agentgym.generation import Generation

COUNTERS = ("requests", "generated_tokens", "prefill_tokens", "cached_tokens", "preemptions")


def count_turn(counters: dict[str, float], prompt_length: int, generation: Generation) -> None:
    """Add a turn to the counters, by the names of `COUNTERS`."""
    counters["requests"] += 1
    counters["generated_tokens"] += len(generation.token_ids)
    counters["prefill_tokens"] += prompt_length - generation.cached_tokens
    counters["cached_tokens"] += generation.cached_tokens
    counters["preemptions"] += generation.preemptions
