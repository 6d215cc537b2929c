from __future__ import annotations

import pytest

from agentgym.tokens import get_parser
from agentgym.types import ToolCall

parse = get_parser("hermes").parse


def test_tags_inside_strings_are_text() -> None:  # A1
    turn = parse('<tool_call>{"name":"write_note","arguments":{"text":"close with </tool_call> please"}}</tool_call>')
    assert turn.tool_calls == (ToolCall(name="write_note", arguments={"text": "close with </tool_call> please"}),)
    assert (turn.content, turn.errors) == ("", ())


def test_all_tags_inside_strings_are_text() -> None:  # A1
    text = "<tool_call></think><think>{}[]}"
    turn = parse('a <tool_call>{"name":"f","arguments":{"x":"' + text + '"}}</tool_call> b')
    assert turn.tool_calls == (ToolCall(name="f", arguments={"x": text}),)
    assert turn.content == "a\nb"


def test_nested_braces_are_read_to_the_end() -> None:  # A2
    turn = parse('<tool_call>{"name":"plot","arguments":{"opts":{"axis":{"x":{"log":true}}}}}</tool_call>')
    assert turn.tool_calls == (ToolCall(name="plot", arguments={"opts": {"axis": {"x": {"log": True}}}}),)
    assert (turn.content, turn.errors) == ("", ())


@pytest.mark.parametrize("separator", ["\n", "", ", ", " ; "])
def test_two_objects_in_one_tag_are_two_calls(separator: str) -> None:  # A5
    one = '{"name":"calculator","arguments":{"expression":"1+1"}}'
    turn = parse(f"<tool_call>{one}{separator}{one.replace('1+1', '2+2')}</tool_call>")
    assert [call.arguments["expression"] for call in turn.tool_calls] == ["1+1", "2+2"]
    assert turn.errors == ()


def test_an_array_in_a_tag_gives_its_items() -> None:  # A5
    assert [call.name for call in parse('<tool_call>[{"name":"a"},{"name":"b"}]</tool_call>').tool_calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ('{"arguments":{"expression":"1+1"}}', '"name"'),
        ('{"name":"","arguments":{}}', '"name"'),
        ('{"name":3}', '"name"'),
        ("[1]", "not a number"),
        ('{"name":"f","arguments":[1]}', "not an array"),
        ('{"name":"f","arguments":"[1]"}', "not an array"),
        ('{"name":"f","arguments":"{1"}', "not valid JSON"),
        ('{"name":"f","arguments":"{} x"}', "unexpected text"),
        ('{"name":"calculator","arguments":{"expression":"2+2"}', "delimiter"),  # A7 (a)
        ("{'name':'calculator','arguments':{}}", "double quotes"),  # A7 (b)
        ('{"name":"f","arguments":{"x":NaN}}', "NaN"),
        ('{"name":"f","arguments":{"x":1e999}}', "too large"),
        ('{"name":"f","arguments":{"x":' + "9" * 5000 + "}}", "digits"),
        ('{"name":"f","arguments":{"x":' + "[" * 200 + "]" * 200 + "}}", "deep"),
        ("[" * 100_000, "deep"),
        ("", "no JSON object"),
        ("42", "no JSON object"),
    ],
)
def test_a_malformed_call_is_one_error_that_says_what_is_wrong(block: str, reason: str) -> None:  # A5 (c), A7
    turn = parse(f"before <tool_call>{block}</tool_call> after")
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1
    assert reason in turn.errors[0].message
    assert turn.content == "before\nafter"


def test_real_newlines_in_strings_are_accepted() -> None:  # A7 (c)
    turn = parse('<tool_call>{"name":"run","arguments":{"code":"a=1\nprint(a)\t"}}</tool_call>')
    assert turn.tool_calls == (ToolCall(name="run", arguments={"code": "a=1\nprint(a)\t"}),)


@pytest.mark.parametrize("given", ['"arguments":""', '"arguments":"  "', '"arguments":{}', '"arguments":null', None])
def test_no_arguments_is_an_empty_object(given: str | None) -> None:  # A9
    turn = parse('<tool_call>{"name":"reset_memory"' + (f",{given}" if given else "") + "}</tool_call>")
    assert turn.tool_calls == (ToolCall(name="reset_memory", arguments={}),)


@pytest.mark.parametrize(
    "text", ['"arguments":"{\\"x\\": 1}"', '"parameters":{"x":1}', '"arguments":null,"parameters":{"x":1}']
)
def test_arguments_may_be_a_string_or_called_parameters(text: str) -> None:
    assert parse(f'<tool_call>{{"name":"f",{text}}}</tool_call>').tool_calls == (
        ToolCall(name="f", arguments={"x": 1}),
    )


@pytest.mark.parametrize("city", ["Zürich 東京 🎯", "Z\\u00fcrich 東京 \\ud83c\\udfaf"])
def test_escaped_and_literal_characters_are_the_same(city: str) -> None:  # A16
    turn = parse(f'<tool_call>{{"name":"f","arguments":{{"city":"{city}"}}}}</tool_call>')
    assert turn.tool_calls[0].arguments == {"city": "Zürich 東京 🎯"}


def test_half_characters_are_replaced() -> None:
    turn = parse('<tool_call>{"name":"f","arguments":{"\\ud800":["a\\udfff"]}}</tool_call>')
    assert turn.tool_calls[0].arguments == {"\ufffd": ["a\ufffd"]}


@pytest.mark.parametrize("text", ['<tool_call>{"name":"f"}', '<tool_call>{"name":"f"}\n', 'a<tool_call>{"name":"f"} b'])
def test_the_closing_tag_may_be_missing(text: str) -> None:
    turn = parse(text)
    assert turn.tool_calls == (ToolCall(name="f", arguments={}),)
    assert turn.errors == ()


def test_text_between_a_call_and_its_closing_tag_is_an_error_beside_the_call() -> None:
    turn = parse('<tool_call>{"name":"f"}}</tool_call><tool_call>{"name":"g"}</tool_call>')
    assert [call.name for call in turn.tool_calls] == ["f", "g"]
    assert "'}'" in turn.errors[0].message
    assert turn.content == ""


def test_a_good_call_after_a_malformed_one_is_read() -> None:
    turn = parse('<tool_call>{bad}</tool_call><tool_call>{"name":"g"}</tool_call> and <tool_call>')
    assert [call.name for call in turn.tool_calls] == ["g"]
    assert len(turn.errors) == 2


def test_a_call_quoted_in_a_malformed_one_is_not_run() -> None:
    turn = parse('<tool_call>{"name":"note","arguments":{"text":"x <tool_call>{}</tool_call>"}</tool_call>')
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1
