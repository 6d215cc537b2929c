"""The two spaces of every environment: `Messages` (observations) and `Assistant` (actions)."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, cast, get_args

import gymnasium
import numpy as np

from agentgym.errors import ConfigError
from agentgym.types import AssistantTurn, FinishReason, Message, ParseError, ToolCall

ROLES = ("system", "user", "assistant", "tool")
_KEYS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls"})
_PART_TYPES = ("text", "image", "video")

# What models write when they err: pieces of tool tags, of JSON, of chat templates, and text in many scripts.
_FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "calculator", "arguments": {}}',
    '{"name": ',
    "<think>",
    "</think>",
    "<|im_end|>",
    "#### 42",
    "\\boxed{7}",
    "Zürich 東京 🎯",
)
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n\t"


class Messages(gymnasium.Space[tuple[Message, ...]]):
    """Tuples of chat messages, also empty ones: the new messages since the last action.

    A message is a dict with ``role`` (system, user, assistant, tool) and ``content`` (text or a list of parts), and
    optionally ``name``, ``tool_call_id`` (text) and ``tool_calls`` (a list).
    """

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Up to three messages with random text. Masks do not apply here: `ConfigError`."""
        _refuse_masks(self, mask, probability)
        return tuple(self._sample_message() for _ in range(int(self.np_random.integers(4))))

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(is_message(message) for message in x)

    def to_jsonable(self, sample_n: Iterable[tuple[Message, ...]]) -> list[Any]:
        """Each observation as a list of dicts."""
        return [[dict(message) for message in observation] for observation in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[tuple[Message, ...]]:
        return [tuple(cast(Message, dict(message)) for message in observation) for observation in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Messages)

    def __hash__(self) -> int:
        return hash(Messages)

    def __repr__(self) -> str:
        return "Messages()"

    def _sample_message(self) -> Message:
        role = ROLES[int(self.np_random.integers(len(ROLES)))]
        text = random_text(self.np_random)
        if role == "tool":
            return Message(role=role, content=text, name="calculator", tool_call_id="call00001")
        return Message(role=role, content=text)


class Assistant(gymnasium.Space[str | AssistantTurn]):
    """What a model may do in one turn: any text at all, also none, or an `AssistantTurn`. Samples are text."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str | AssistantTurn:
        """Random text, sometimes empty, with pieces of tool calls in it. Masks do not apply here: `ConfigError`."""
        _refuse_masks(self, mask, probability)
        return random_text(self.np_random)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or _is_turn(x)

    def to_jsonable(self, sample_n: Iterable[str | AssistantTurn]) -> list[Any]:
        """Text as it is, a turn as a dict."""
        return [action if isinstance(action, str) else asdict(action) for action in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[str | AssistantTurn]:
        return [action if isinstance(action, str) else _turn_from_dict(action) for action in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assistant)

    def __hash__(self) -> int:
        return hash(Assistant)

    def __repr__(self) -> str:
        return "Assistant()"


def is_message(x: object) -> bool:
    """True if ``x`` is a well-formed chat message."""
    return (
        isinstance(x, dict)
        and _KEYS.issuperset(x)
        and x.get("role") in ROLES
        and _is_content(x.get("content"))
        and isinstance(x.get("name", ""), str)
        and isinstance(x.get("tool_call_id", ""), str)
        and isinstance(x.get("tool_calls", []), list)
    )


def random_text(rng: np.random.Generator) -> str:
    """A few random pieces: characters, broken markup, non-ASCII text; empty once in about eight times."""
    pieces = []
    for _ in range(int(rng.integers(8))):
        if rng.random() < 0.5:
            pieces.append(_FRAGMENTS[int(rng.integers(len(_FRAGMENTS)))])
        else:
            pieces.extend(_CHARACTERS[i] for i in rng.integers(len(_CHARACTERS), size=int(rng.integers(1, 9))))
    return "".join(pieces)


def _is_content(x: object) -> bool:
    if isinstance(x, str):
        return True
    return isinstance(x, list) and all(
        isinstance(part, dict)
        and part.get("type") in _PART_TYPES
        and (part["type"] != "text" or isinstance(part.get("text"), str))
        for part in x
    )


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, AssistantTurn)
        and isinstance(cast(Any, turn.content), str)
        and all(isinstance(call, ToolCall) for call in turn.tool_calls)
        and all(isinstance(error, ParseError) for error in turn.errors)
        and turn.finish_reason in get_args(FinishReason)
    )


def _turn_from_dict(data: dict[str, Any]) -> AssistantTurn:
    calls = tuple(ToolCall(**call) for call in data["tool_calls"])
    errors = tuple(ParseError(**error) for error in data["errors"])
    return AssistantTurn(**{**data, "tool_calls": calls, "errors": errors})


def _refuse_masks(space: object, mask: object, probability: object) -> None:
    if mask is not None or probability is not None:
        raise ConfigError(f"{space!r} has no finite set of elements: sample() takes neither mask nor probability")
