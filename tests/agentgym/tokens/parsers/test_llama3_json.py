from __future__ import annotations

import pytest

from agentgym.tokens import get_parser
from agentgym.types import ToolCall

parse = get_parser("llama3_json").parse


@pytest.mark.parametrize("tag", ["<|python_tag|>", "", "\n ", "<think>hm</think>\n"])
def test_nested_braces_are_read_to_the_end(tag: str) -> None:  # A2
    turn = parse(tag + '{"name":"plot","parameters":{"opts":{"axis":{"x":{"log":true}}}}}')
    assert turn.tool_calls == (ToolCall(name="plot", arguments={"opts": {"axis": {"x": {"log": True}}}}),)
    assert "}" not in turn.content


@pytest.mark.parametrize("separator", ["; ", ";", "\n", "; <|python_tag|>", "<|python_tag|>"])
def test_several_calls(separator: str) -> None:  # A5
    turn = parse('<|python_tag|>{"name":"a","parameters":{"x":";"}}' + separator + '{"name":"b"}')
    assert [call.name for call in turn.tool_calls] == ["a", "b"]
    assert (turn.content, turn.errors) == ("", ())


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        "[1, 2]",
        '[{"name": "Bob", "age": 3}]',
        'It is {"name": "f"}',
        "{",
        "{}",
    ],
)
def test_an_answer_in_json_is_an_answer(text: str) -> None:
    turn = parse(text)
    assert (turn.content, turn.tool_calls, turn.errors) == (text, (), ())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"x": 1}',
        "{'name': 'f', 'parameters': {}}",
        "<|python_tag|>brave_search.call(query='x')",
        "<|python_tag|>",
        '<|python_tag|>{"parameters": {}}',
    ],
)
def test_a_malformed_call_is_one_error(text: str) -> None:  # A7
    turn = parse(text)
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1


def test_a_good_call_after_a_malformed_one_is_read() -> None:
    turn = parse('<|python_tag|>{"name": x}<|python_tag|>{"name":"g"}')
    assert [call.name for call in turn.tool_calls] == ["g"]
    assert len(turn.errors) == 1


def test_text_after_a_call_is_content() -> None:
    turn = parse('{"name":"f","parameters":{}} done')
    assert [call.name for call in turn.tool_calls] == ["f"]
    assert turn.content == "done"
