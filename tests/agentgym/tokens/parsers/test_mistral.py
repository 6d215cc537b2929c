from __future__ import annotations

import pytest

from agentgym.tokens import get_parser
from agentgym.types import ToolCall

parse = get_parser("mistral").parse


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "]["}}, {"name": "b", "arguments": {}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]a[ARGS]{"x": "]["}[TOOL_CALLS]b[ARGS]{}',
        '[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{"x": "]["}[TOOL_CALLS]b{}',
        '[TOOL_CALLS] {"name": "a", "arguments": {"x": "]["}} [TOOL_CALLS] {"name": "b"}',
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "]["}}] [TOOL_CALLS] [{"name": "b"}]',
    ],
)
def test_all_forms_of_two_calls(text: str) -> None:  # A5
    turn = parse(f"ok{text}")
    assert turn.tool_calls == (ToolCall(name="a", arguments={"x": "]["}), ToolCall(name="b", arguments={}))
    assert (turn.content, turn.errors) == ("ok", ())


@pytest.mark.parametrize(
    "block", ['[{"name": "a"', "[]", "", "x", "a[ARGS]{1}", "a[ARGS][1]", '[{"arguments": {}}]', "[3]", "a[ARGS]"]
)
def test_a_malformed_call_is_one_error(block: str) -> None:  # A7
    turn = parse(f"[TOOL_CALLS]{block}[TOOL_CALLS]g{{}}")
    assert [call.name for call in turn.tool_calls] == ["g"]
    assert len(turn.errors) == 1
