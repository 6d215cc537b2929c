"""Turns as chat messages."""

from __future__ import annotations

from typing import Any

from agentgym.messages import (
    assistant_message,
    error_message,
    from_openai_messages,
    openai_messages,
    text_of,
    turn_from_openai,
)
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


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SAID = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "1"}
WRONG = {"role": "tool", "name": "error", "tool_call_id": "err000001", "content": "Error: no JSON"}


def test_a_conversation_in_the_form_of_the_openai_api_and_back() -> None:
    conversation: Any = [{"role": "user", "content": "?"}, SAID, ANSWER]
    converted = openai_messages(conversation)
    assert converted[1]["content"] is None
    assert converted[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert converted[2] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert from_openai_messages(converted) == conversation
    assert SAID["tool_calls"] == [CALL]  # the conversation itself is untouched
    assert CALL["function"]["arguments"] == {"a": 1}


def test_an_answer_to_no_call_becomes_a_users_message() -> None:
    malformed: Any = [{"role": "assistant", "content": "<tool_call>{"}, WRONG]
    assert openai_messages(malformed)[1] == {"role": "user", "content": "Error: no JSON"}
    observation: Any = [ANSWER, WRONG]  # new messages alone: the call stands before them
    assert [message["role"] for message in openai_messages(observation)] == ["tool", "user"]


def test_a_turn_in_the_form_of_the_openai_api() -> None:
    good = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    bad = {"id": "c2", "function": {"name": "add", "arguments": '{"a": '}}
    turn = turn_from_openai({"content": None, "tool_calls": [good, bad, {"id": "c3"}]}, finish_reason="tool_calls")
    assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [("c1", "add", {"a": 1})]
    assert ["not valid JSON" in error.message or "no name" in error.message for error in turn.errors] == [True, True]
    assert turn.raw is not None
    assert '"arguments": {"a": }' in turn.raw  # the conversation shows what was wrong
    assert turn_from_openai({"content": "x"}, finish_reason="length").finish_reason == "length"
    assert turn_from_openai({"content": [{"type": "text", "text": "x"}]}).content == "x"
