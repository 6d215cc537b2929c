"""The records that environments, sessions, loops and trainers exchange. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length"]
"""Why a generation ended: an end-of-turn token or stop string, or its token limit."""

Part = dict[str, Any]
"""One part of a message: ``{"type": "text" | "image" | "video", ...}``."""

Content = str | list[Part]


SPLITS = ("train", "validation")
"""The splits that every environment has."""


class Message(TypedDict):
    """A chat message. Tool messages have ``name`` and ``tool_call_id``; assistant messages may have ``tool_calls``."""

    role: str
    content: Content
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model asked for: ``ToolCall(name="calculator", arguments={"expression": "6*7"})``."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """Set by the loop (``call00001``: nine alphanumeric characters, which every known template accepts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseError:
    """A tool call that could not be read. It is answered to the model, never raised."""

    message: str
    """What was wrong, in words for the model."""
    raw: str = ""
    """The text that could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """What the model did in one turn, as the environment sees it.

    Example:
        ``AssistantTurn(content="#### 42")`` is a final answer;
        ``AssistantTurn(content="", tool_calls=(ToolCall(name="calculator", arguments={"expression": "6*7"}),))`` a
        call.
    """

    content: str = ""
    """The text outside of tool calls."""
    tool_calls: Sequence[ToolCall] = ()
    errors: Sequence[ParseError] = ()
    """Malformed calls. A turn with errors is not a final answer."""
    finish_reason: FinishReason = "stop"
    """``"length"``: the text was cut; its calls never run."""
    raw: str | None = None
    """The full text as the model wrote it, if the turn was parsed from text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponse:
    """What a tool answers: text, and images or videos for models that see them."""

    text: str | None = None
    image: Sequence[Any] = ()
    video: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of an environment.

    Example:
        ``Task(id="train-17", prompt="What is 6 times 7?", data={"answer": "42"})``
    """

    id: str
    """Unique within environment and split; stable across processes."""
    prompt: str | Sequence[Message]
    """A user message, or the messages that open the conversation."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever scoring needs: the ground truth, a grader's settings."""
    tool_selection: Sequence[str] | None = None
    """Names of the tools this task may use; None: all, empty: none."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Per tool name: ``{"create_kwargs": {...}}``."""
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    """The agent loop that plays this task; None: the configured one."""
    data_source: str = ""


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TIMED_OUT = "timed_out"
    FAILED_INFRA = "failed_infra"
    FAILED_ENV = "failed_env"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """True where no reward exists: such a rollout is in no baseline and no loss."""
        return self in (RolloutStatus.FAILED_INFRA, RolloutStatus.FAILED_ENV, RolloutStatus.CANCELLED)

    @property
    def truncated(self) -> bool:
        """True where a limit (turns, tokens, wall clock) ended the episode."""
        return self in (RolloutStatus.TRUNCATED_TURNS, RolloutStatus.TRUNCATED_TOKENS, RolloutStatus.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step of a session gives back; the Gymnasium five with names."""

    observation: tuple[Message, ...]
    """The new messages since the last action."""
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The sum of a session: how it ended, its reward and its counters."""

    status: RolloutStatus
    reward: float | None
    """Sum of the step rewards; None where the session could not be scored. Never 0 for a failure."""
    reward_components: Mapping[str, float | None] = field(default_factory=dict)
    """Parts of the score by name; None: this rollout has no value under a name that others of its batch have."""
    turn_rewards: Sequence[float] = ()
    """Reward of each step; the last one includes what a limit that ended the episode added."""
    turn_scores: Sequence[float] = ()
    """One per user turn that an interaction scored."""
    tool_rewards: Sequence[float] = ()
    num_turns: int = 0
    """Assistant turns."""
    num_user_turns: int = 0
    """User turns after the first prompt."""
    tool_calls: int = 0
    tool_errors: int = 0
    parse_errors: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error_type: str | None = None
    error: str | None = None
    """Message and traceback of a failure."""
