"""Conversations through a tokenizer's chat template, as text in which foreign control tokens are marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError
from agentgym.tokens.encoding import Encoder, unused_mark
from agentgym.tokens.parsers.json_calls import read_arguments
from agentgym.types import Message

if TYPE_CHECKING:
    import re

    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prepared:
    """Messages and tools as the template gets them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    mark: str
    """Stands inside of each added token that a message or a tool schema contains."""


@dataclass(frozen=True, slots=True)
class _Tools:
    """Marked tool schemas; ``key`` says of which, with which mark."""

    key: tuple[str, str]
    marked: list[Any]
    clashes: list[str]


class ChatTemplate:
    """The chat template of a tokenizer. Raises `ConfigError` if there is none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, template_kwargs: Mapping[str, Any]
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template. Use a chat model, "
                f"or set one: tokenizer.chat_template = Path('chat_template.jinja').read_text()"
            )
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._kwargs = dict(template_kwargs)
        self._foreign = encoder.pattern()
        self._turn_tokens: re.Pattern[str] | None = self._foreign
        self._last_tools = _Tools(("", ""), [], [])

    def trust_assistant(self, turn_tokens: Sequence[str]) -> None:
        """Leave the tags of assistant messages (thinking, tool calls) to be tokens, all but ``turn_tokens``: the model
        wrote them, but it never opens or closes a turn in the middle of one."""
        self._turn_tokens = self._encoder.pattern(turn_tokens)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Prepared:
        """Bring messages and tools to what templates expect, and mark the added tokens in them.

        Content is text (None becomes empty, text parts are joined by newlines), arguments of calls are objects.
        Raises `ConfigError` for a part that is not text.
        """
        mark = unused_mark()
        while True:
            marker = _Marker(self._encoder, mark)
            prepared = Prepared(
                [self._message(message, i, marker) for i, message in enumerate(messages)],
                self._marked_tools(tools, marker) if tools else None,
                mark,
            )
            if not marker.clashes:
                return prepared
            mark = unused_mark(*marker.clashes, mark)

    def _marked_tools(self, tools: Sequence[Mapping[str, Any]], marker: _Marker) -> list[Any]:
        """The schemas with their added tokens marked; those of the last call are kept, for they seldom change."""
        key = (repr(tools), marker.mark)  # not by ==, for which True is 1 and the order of keys is nothing
        kept = self._last_tools
        if kept.key != key:
            own = _Marker(self._encoder, marker.mark)
            marked = [own.walk(tool, self._foreign) for tool in tools]
            self._last_tools = kept = _Tools(key, marked, own.clashes)
        marker.clashes += kept.clashes
        return kept.marked

    def render(self, prepared: Prepared, stop: int | None = None, *, generation_prompt: bool) -> str:
        """The text of the first ``stop`` messages. Raises `ConfigError` with the template's complaint."""
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    prepared.messages[:stop],
                    tools=prepared.tools,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self._kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in prepared.messages[:stop])
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path or 'this model'!r} refused a conversation with "
                f"the roles [{roles}]: {error}. `Renderer.audit()` shows what the template accepts."
            ) from error

    def _message(self, message: Message, index: int, marker: _Marker) -> dict[str, Any]:
        role = message["role"]
        pattern = self._turn_tokens if role == "assistant" else self._foreign
        prepared: dict[str, Any] = {"role": role}
        for key, value in message.items():
            if key == "content":
                prepared[key] = marker.text(_text(value, role, index), pattern)
            elif key == "tool_calls":
                if value:
                    prepared[key] = [marker.walk(_call(call), pattern) for call in value]  # type: ignore[attr-defined]
            elif key != "role":
                prepared[key] = marker.walk(value, pattern)
        prepared.setdefault("content", "")
        return prepared


class _Marker:
    """Marks the strings of one conversation; ``clashes`` are those that already contained the mark."""

    def __init__(self, encoder: Encoder, mark: str) -> None:
        self._encoder = encoder
        self.mark = mark
        self.clashes: list[str] = []

    def text(self, text: str, pattern: re.Pattern[str] | None) -> str:
        if self.mark in text:
            self.clashes.append(text)
        return self._encoder.mark(text, pattern, self.mark)

    def walk(self, value: Any, pattern: re.Pattern[str] | None) -> Any:
        if isinstance(value, str):
            return self.text(value, pattern)
        if isinstance(value, Mapping):
            return {self.walk(key, pattern): self.walk(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.walk(item, pattern) for item in value]
        return value


def _text(content: Any, role: str, index: int) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ConfigError(
            f"message {index} ({role}): content is {type(content).__name__}, expected text or a list of parts"
        )
    for part in content:
        if part["type"] != "text":
            raise ConfigError(
                f"message {index} ({role}) has a part of type {part['type']!r}, and this model reads text only. "
                f"Use a model that sees images, or answer with text."
            )
    return "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as an object: templates write them as JSON, which would quote a string twice."""
    function = call["function"]
    given = function.get("arguments")
    arguments = read_arguments(given)
    return {**call, "function": {**function, "arguments": given if isinstance(arguments, str) else arguments}}
