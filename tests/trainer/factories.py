"""Rollouts and batches for the tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from agentgym.rollout import Rollout
from agentgym.tokens.output import AgentLoopOutput, Span
from agentgym.types import Outcome, RolloutStatus


def segment(prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], **fields: Any) -> AgentLoopOutput:
    spans, start = [], 0
    for model, run in groupby(mask):
        stop = start + len(list(run))
        kind = "model" if model else "environment"
        spans.append(Span(start=start, stop=stop, kind=kind, turn=0, weight_version=3 if model else None))  # type: ignore[arg-type]
        start = stop
    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=list(response),
        response_mask=list(mask),
        response_logprobs=[-0.5 if m else 0.0 for m in mask],
        spans=spans,
        **fields,
    )


def rollout(
    reward: float | None,
    *segments: AgentLoopOutput,
    group: str = "g",
    sample: int = 0,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    **outcome: Any,
) -> Rollout:
    return Rollout(
        env_id="e",
        task_id=f"task-{group}",
        group=group,
        sample=sample,
        outcome=Outcome(status=status, reward=reward, **outcome),
        segments=segments,
    )
