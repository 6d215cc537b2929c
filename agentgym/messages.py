"""Small functions on chat messages."""

from __future__ import annotations

from agentgym.types import AssistantTurn, Message, ParseError


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
