"""What a session counts and adds up on its way to an `Outcome`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import EnvError, InfraError, SessionTimeout
from agentgym.types import Message, Outcome, RolloutStatus


@dataclass(slots=True)
class Tally:
    """What a session counts and adds up."""

    reward: float = 0.0
    last: float = 0.0
    """Part of ``reward`` that came at the end of the episode: of its last step, or of the truncation."""
    scored: bool = True
    turns: int = 0
    user_turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    parse_errors: int = 0
    components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)

    def add(self, reward: float, observation: Sequence[Message], info: Mapping[str, Any]) -> None:
        """Count one step. The keys of ``info`` that count are listed in `Session`."""
        self.reward += reward
        self.turn_rewards.append(reward)
        self.last = reward
        self.user_turns += sum(message["role"] == "user" for message in observation)
        if not info:
            return
        self.tool_calls += info.get("tool_calls", 0)
        self.tool_errors += info.get("tool_errors", 0)
        self.parse_errors += info.get("parse_errors", 0)
        self.tool_rewards.extend(map(float, info.get("tool_rewards", ())))
        if (score := info.get("turn_score")) is not None:
            self.turn_scores.append(float(score))
        for total, key in ((self.components, "reward_components"), (self.metrics, "metrics")):
            for name, value in info.get(key, {}).items():
                total[name] = total.get(name, 0.0) + float(value)

    def add_final(self, reward: float) -> None:
        """Count the reward that the environment gives when a limit ends the episode; it belongs to the last turn."""
        self.reward += reward
        if self.turn_rewards:
            self.turn_rewards[-1] += reward

    def outcome(self, status: RolloutStatus, error: BaseException | None) -> Outcome:
        """The sum so far, for a session that ended with ``status``, because of ``error`` if there was one."""
        trace = error.traceback_text if isinstance(error, EnvError) else ""
        return Outcome(
            status=status,
            reward=self.reward if self.scored and not status.failed else None,
            reward_components=dict(self.components),
            turn_rewards=tuple(self.turn_rewards),
            turn_scores=tuple(self.turn_scores),
            tool_rewards=tuple(self.tool_rewards),
            num_turns=self.turns,
            num_user_turns=self.user_turns,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            parse_errors=self.parse_errors,
            metrics=dict(self.metrics),
            error_type=error_type(error),
            error=None if error is None else f"{error}\n{trace}".strip(),
        )


def status_of(error: BaseException) -> RolloutStatus:
    """The status of a session that ``error`` ended. Anything unknown counts as a fault of the code that was run."""
    if isinstance(error, SessionTimeout):
        return RolloutStatus.TIMED_OUT
    if isinstance(error, InfraError | ConnectionError):
        return RolloutStatus.FAILED_INFRA
    return RolloutStatus.FAILED_ENV if isinstance(error, Exception) else RolloutStatus.CANCELLED


def error_type(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return error.error_type if isinstance(error, EnvError) else type(error).__name__
