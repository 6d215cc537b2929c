from __future__ import annotations

from typing import Any

import pytest

from agentgym.tokens import get_parser
from agentgym.types import ToolCall

parse = get_parser("qwen3_xml").parse


def typed(**schemas: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": schemas}}}]


def call(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value", ["close with </tool_call> please", "a</parameter>b", "<b>", "", "\n  x\n", '{"a": "}"}']
)
def test_tags_inside_values_are_text(value: str) -> None:  # A1
    turn = parse(f"a {call(value)} b")
    assert turn.tool_calls == (ToolCall(name="f", arguments={"x": value}),)
    assert (turn.content, turn.errors) == ("a\nb", ())


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[]", []),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "integer"}, "1 2", "1 2"),
        ({}, "12", "12"),
        (True, "12", "12"),
    ],
)
def test_values_get_the_types_of_the_schema(schema: Any, value: str, expected: object) -> None:
    (found,) = parse(call(value), typed(x=schema)).tool_calls
    assert found.arguments == {"x": expected}
    assert type(found.arguments["x"]) is type(expected)


def test_values_are_text_without_a_schema() -> None:
    assert parse(call("12")).tool_calls[0].arguments == {"x": "12"}
    assert parse(call("12"), [{"type": "function", "function": {"name": "g"}}]).tool_calls[0].arguments == {"x": "12"}


@pytest.mark.parametrize(
    "text",
    [
        "<function=f></function>",
        "<tool_call><function=f></function>",
        "<tool_call><function=f></tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<function=f>",
    ],
)
def test_the_outer_tags_and_the_end_may_be_missing(text: str) -> None:
    turn = parse(text)
    assert turn.tool_calls == (ToolCall(name="f", arguments={}),)
    assert (turn.content, turn.errors) == ("", ())


def test_two_functions_in_one_tag_are_two_calls() -> None:  # A5
    turn = parse("<tool_call><function=f></function><function=g></function></tool_call><function=h></function>")
    assert [found.name for found in turn.tool_calls] == ["f", "g", "h"]
    assert turn.content == ""


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f>text</function></tool_call>",
        "<tool_call><function=f><parameter=x>1</function></tool_call>",
    ],
)
def test_a_malformed_call_is_one_error(text: str) -> None:  # A7
    turn = parse(f"before {text} after")
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1
    assert turn.content == "before\nafter"
