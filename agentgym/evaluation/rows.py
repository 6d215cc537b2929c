"""`Row`: what a report needs of one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.messages import text_of
from agentgym.types import RolloutStatus

Key = tuple[str, int]
"""Task id and sample: what names a rollout of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout in short."""

    task_id: str
    sample: int
    status: RolloutStatus
    reward: float | None
    """None where it could not be scored."""
    answer: str = ""
    """The text of the last assistant message; empty where the last message is another one."""
    data_source: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    tokens: float = 0.0
    """That the model wrote."""
    tool_calls: int = 0
    tool_errors: int = 0
    parse_errors: int = 0
    seconds: float = 0.0
    error_type: str | None = None
    error: str | None = None

    @property
    def key(self) -> Key:
        return self.task_id, self.sample

    @classmethod
    def of(cls, rollout: Mapping[str, Any]) -> Row:
        """The row of a rollout as `agentgym.rollout.Rollout.to_dict` writes it."""
        outcome, segments = rollout["outcome"], rollout["segments"]
        metrics = rollout.get("metrics") or {}
        written = sum(sum(segment["response_mask"]) for segment in segments)
        return cls(
            task_id=rollout["task_id"],
            sample=rollout["sample"],
            status=RolloutStatus(outcome["status"]),
            reward=outcome["reward"],
            answer=final_answer(rollout["conversation"]),
            data_source=rollout.get("data_source") or "",
            components={name: value for name, value in outcome["reward_components"].items() if value is not None},
            turns=outcome["num_turns"],
            tokens=written if segments else metrics.get("completion_tokens", 0.0),
            tool_calls=outcome["tool_calls"],
            tool_errors=outcome["tool_errors"],
            parse_errors=outcome["parse_errors"],
            seconds=rollout["seconds"],
            error_type=outcome["error_type"],
            error=outcome["error"],
        )


def final_answer(conversation: Any) -> str:
    """The text of the last message if it is an assistant's without calls, else empty: a limit came first."""
    if not conversation or conversation[-1]["role"] != "assistant" or conversation[-1].get("tool_calls"):
        return ""
    return text_of({"role": "assistant", "content": conversation[-1]["content"] or ""})
