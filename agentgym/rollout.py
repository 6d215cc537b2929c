"""`Rollout`: the record of one played task, the same for training, validation, evaluation and replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.tokens.output import AgentLoopOutput, Span
from agentgym.types import Message, Outcome, RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One task played once.

    A rollout always exists, also for a failure: ``outcome.status`` says how it ended and ``outcome.reward`` is None
    where it could not be scored.
    """

    env_id: str
    task_id: str
    group: str
    """Key of the sampled prompt (task and draw): rollouts with the same key are compared with each other."""
    sample: int
    """Index within the group."""
    outcome: Outcome
    segments: Sequence[AgentLoopOutput] = ()
    """Usually one; more where a template rewrites history; none where nothing was generated."""
    conversation: Sequence[Message] = ()
    seconds: float = 0.0
    """Wall clock from opening to closing of the session."""
    attempts: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    split: str = ""
    """Split of the environment's tasks."""
    seed: int | None = None
    """Of the environment's ``reset``."""
    data_source: str = ""
    """Of the task; metrics are also told apart by it."""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    """What a reward function gave beside numbers, e.g. the answer it read."""

    @property
    def status(self) -> RolloutStatus:
        return self.outcome.status

    @property
    def reward(self) -> float | None:
        return self.outcome.reward

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` gives the rollout back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """The inverse of `to_dict`, also after a round trip through JSON."""
        segments = [
            AgentLoopOutput(
                **{
                    **segment,
                    "status": RolloutStatus(segment["status"]),
                    "spans": [Span(**span) for span in segment["spans"]],
                }
            )
            for segment in data["segments"]
        ]
        outcome = Outcome(**{**data["outcome"], "status": RolloutStatus(data["outcome"]["status"])})
        return cls(**{**data, "segments": segments, "outcome": outcome})
