"""Exact token records: what the engine sampled, what the environment added, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentgym.errors import TokenAlignmentError
from agentgym.types import RolloutStatus

SpanKind = Literal["model", "environment", "template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run ``[start, stop)`` of response positions with one origin."""

    start: int
    stop: int
    kind: SpanKind
    """``model``: sampled by the engine (mask 1); ``environment``: rendered observation; ``template``: an end-of-turn
    token that the loop appended itself."""
    turn: int
    """Index of the assistant turn that the run belongs to or follows."""
    weight_version: int | None = None
    """Of the engine that sampled it; None for runs the engine did not sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopOutput:
    """One segment of a rollout: a prompt and the response tokens that followed it.

    Invariants, checked on construction: the three response sequences are of equal length; mask is 0 or 1; mask 0
    implies log-prob 0.0; every log-prob is finite and <= 0 up to rounding; the spans tile the response, and mask 1
    stands exactly on the ``model`` spans.

    Example:
        prompt ``[5, 6]``, model ``[7, 2]``, tool ``[9]``, model ``[8, 2]`` gives
        ``response_ids=[7, 2, 9, 8, 2]``, ``response_mask=[1, 1, 0, 1, 1]``.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float]
    spans: Sequence[Span]
    reward: float | None = None
    """Of the whole rollout, the same in each of its segments; None: not scored."""
    reward_components: Mapping[str, float | None] = field(default_factory=dict)
    turn_scores: Sequence[float] = ()
    tool_rewards: Sequence[float] = ()
    num_turns: int = 0
    status: RolloutStatus = RolloutStatus.COMPLETED
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra_fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        if not n == len(self.response_mask) == len(self.response_logprobs):
            raise TokenAlignmentError(
                f"response_ids ({n}), response_mask ({len(self.response_mask)}) and response_logprobs "
                f"({len(self.response_logprobs)}) must have equal lengths"
            )
        for i, (mask, logprob) in enumerate(zip(self.response_mask, self.response_logprobs, strict=True)):
            if mask not in (0, 1):
                raise TokenAlignmentError(f"response_mask[{i}] is {mask!r}, expected 0 or 1")
            if mask == 0 and logprob != 0.0:
                raise TokenAlignmentError(f"response_logprobs[{i}] is {logprob!r} where the mask is 0, expected 0.0")
            if not math.isfinite(logprob) or logprob > 1e-3:
                raise TokenAlignmentError(f"response_logprobs[{i}] is {logprob!r}, expected a finite log-probability")
        position = 0
        for span in self.spans:
            if span.start != position or span.stop <= span.start:
                raise TokenAlignmentError(
                    f"span {span} does not continue at position {position}; spans tile the response"
                )
            expected = 1 if span.kind == "model" else 0
            if any(m != expected for m in self.response_mask[span.start : span.stop]):
                raise TokenAlignmentError(f"span {span} needs response_mask {expected} at each of its positions")
            position = span.stop
        if position != n:
            raise TokenAlignmentError(f"the spans cover {position} of {n} response tokens")

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model sampled; what "response length" means everywhere in agentgym."""
        return sum(self.response_mask)
