"""Small functions on chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError
from agentgym.types import AssistantTurn, FinishReason, Message, ParseError, ToolCall

if TYPE_CHECKING:
    from agentgym.tokens import ToolParser

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of the OpenAI chat API; a developer's message is a system message."""


def assistant_message(turn: AssistantTurn) -> Message:
    """The turn as a chat message, with its calls in OpenAI's form; a malformed turn as the model wrote it."""
    if turn.errors and turn.raw is not None:
        return {"role": "assistant", "content": turn.raw}
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.tool_calls
        ]
    return message


def error_message(error: ParseError, number: int) -> Message:
    """The answer to a malformed call: a tool message named ``error``, with an id of nine characters like any call."""
    return {"role": "tool", "name": "error", "tool_call_id": f"err{number:06d}", "content": f"Error: {error.message}"}


def text_of(message: Message) -> str:
    """The text of a message; of a list of parts, its text parts joined."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def openai_messages(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the form of the OpenAI chat API: arguments of calls are JSON texts, empty content is null.

    Takes a whole conversation or new messages alone. A tool message that answers no call (it says what was wrong with
    a malformed one) becomes a user message: the API refuses it otherwise.
    """
    converted = []
    known: set[str] = set()
    whole = any(message["role"] == "assistant" for message in conversation)
    for message in conversation:
        entry: dict[str, Any] = {**message}
        if message["role"] == "tool":
            name = entry.pop("name", None)  # some servers refuse keys that the API does not have
            if message.get("tool_call_id") not in known and (whole or name == "error"):
                entry = {"role": "user", "content": message["content"]}
        if calls := message.get("tool_calls"):
            known |= {call["id"] for call in calls}
            entry["content"] = message["content"] or None
            entry["tool_calls"] = [_openai_call(call) for call in calls]
        converted.append(entry)
    return converted


def from_openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages of the OpenAI chat API as agentgym's; names of tool messages are those of the calls they answer.

    Raises `ConfigError` for an unknown role or a malformed call.
    """
    names: dict[str, str] = {}
    read: list[Message] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConfigError(f"messages[{number}].role={role!r}: expected one of {', '.join(ROLES)}")
        role = "system" if role == "developer" else role
        entry: Message = {"role": role, "content": "" if content is None else content}
        if calls := message.get("tool_calls"):
            entry["tool_calls"] = [_read_call(call, number) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in entry["tool_calls"]}
        if role == "tool":
            entry["tool_call_id"] = message.get("tool_call_id") or ""
            entry["name"] = message.get("name") or names.get(entry["tool_call_id"], "tool")
        read.append(entry)
    return read


def _read_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    from agentgym.tokens.parsers.json_calls import read_arguments  # late: the parsers are not light

    function = call.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        raise ConfigError(f"messages[{number}].tool_calls: expected objects with a function that has a name")
    arguments = read_arguments(function.get("arguments"))
    if isinstance(arguments, str):
        raise ConfigError(f"messages[{number}].tool_calls: the arguments of {function['name']!r} {arguments}")
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": text}}


def turn_from_openai(
    message: Mapping[str, Any], *, finish_reason: str = "stop", parser: ToolParser | None = None
) -> AssistantTurn:
    """The turn that an assistant message of the OpenAI chat API says.

    Args:
        message: with ``content`` and, if any, ``tool_calls``.
        finish_reason: of the choice; ``"length"`` marks a cut turn.
        parser: reads calls out of the text of a message without ``tool_calls``; None: the text is plain.
    """
    from agentgym.tokens.parsers.json_calls import read_arguments  # late: the parsers are not light

    reason: FinishReason = "length" if finish_reason == "length" else "stop"
    content = message.get("content") or ""
    text = content if isinstance(content, str) else text_of({"role": "assistant", "content": content})
    given = message.get("tool_calls") or ()
    if not given and parser is not None:
        parsed = parser.parse(text)
        return AssistantTurn(
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            errors=parsed.errors,
            finish_reason=reason,
            raw=text,
        )
    calls: list[ToolCall] = []
    errors: list[ParseError] = []
    for call in given:
        function = call.get("function") or {}
        name, arguments = function.get("name"), read_arguments(function.get("arguments"))
        if not name:
            errors.append(ParseError(message="The call has no name.", raw=json.dumps(call, ensure_ascii=False)))
        elif isinstance(arguments, str):
            errors.append(
                ParseError(message=f"The arguments of {name!r} {arguments}", raw=str(function.get("arguments")))
            )
        else:
            calls.append(ToolCall(name=name, arguments=arguments, id=call.get("id") or ""))
    # What was malformed stays readable in the conversation.
    raw = "\n".join([text, *map(_written, given)]).strip() if errors else None
    return AssistantTurn(content=text, tool_calls=tuple(calls), errors=tuple(errors), finish_reason=reason, raw=raw)


def _written(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    name, arguments = json.dumps(function.get("name")), function.get("arguments")
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'
