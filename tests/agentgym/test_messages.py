"""Turns as chat messages."""

from __future__ import annotations

from agentgym.messages import assistant_message, error_message, text_of
from agentgym.types import AssistantTurn, ParseError, ToolCall


def test_a_turn_becomes_a_message_with_its_calls() -> None:
    call = ToolCall(name="add", arguments={"a": 1}, id="call00001")
    assert assistant_message(AssistantTurn(content="hi")) == {"role": "assistant", "content": "hi"}
    assert assistant_message(AssistantTurn(content="hi", tool_calls=[call], raw="hi <tool_call>")) == {
        "role": "assistant",
        "content": "hi",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }


def test_a_malformed_turn_stands_as_the_model_wrote_it() -> None:
    turn = AssistantTurn(content="hi", errors=[ParseError(message="no JSON")], raw="hi <tool_call>{</tool_call>")
    assert assistant_message(turn) == {"role": "assistant", "content": "hi <tool_call>{</tool_call>"}
    assert error_message(turn.errors[0], 12) == {
        "role": "tool",
        "name": "error",
        "tool_call_id": "err000012",
        "content": "Error: no JSON",
    }


def test_the_text_of_a_message_leaves_images_out() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "x"}, {"type": "text", "text": "b"}]
    assert text_of({"role": "user", "content": parts}) == "a\nb"
    assert text_of({"role": "user", "content": "plain"}) == "plain"
