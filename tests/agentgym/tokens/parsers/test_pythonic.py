from __future__ import annotations

import pytest

from agentgym.tokens import get_parser
from agentgym.types import ToolCall

parse = get_parser("pythonic").parse


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'a'", "a"),
        ('"it\'s"', "it's"),
        (r"'a\n\t\\\'\x41\u00fc\101\N{DIGIT ONE}'", "a\n\t\\'Aü\x411"),
        (r"'\d \N{NO SUCH} \ud800'", r"\d \N{NO SUCH} " + "\ufffd"),
        (r"r'\d'", r"\d"),
        ('"""a "b"\nc"""', 'a "b"\nc'),
        ("'a\nb'", "a\nb"),
        ("'Zürich 東京 🎯'", "Zürich 東京 🎯"),
        ("-3", -3),
        ("1_000", 1000),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("[1, [2], ]", [1, [2]]),
        ("(1, 2)", [1, 2]),
        ("{'a': {'b': ']})'}}", {"a": {"b": "]})"}}),
        ("{}", {}),
    ],
)
def test_literals(literal: str, value: object) -> None:
    turn = parse(f"[f(x = {literal} , y=1)]")
    assert turn.tool_calls == (ToolCall(name="f", arguments={"x": value, "y": 1}),)
    assert type(turn.tool_calls[0].arguments["x"]) is type(value)


def test_several_calls_with_dotted_names() -> None:  # A5
    turn = parse('[a(x=1), b.c(), d(\n  y="]",\n)]')
    assert turn.tool_calls == (
        ToolCall(name="a", arguments={"x": 1}),
        ToolCall(name="b.c", arguments={}),
        ToolCall(name="d", arguments={"y": "]"}),
    )


@pytest.mark.parametrize("text", ["[1, 2]", "[link](http://x)", "see [f(x=1)]", "[]", "[x]", "f(x=1)"])
def test_other_text_is_content(text: str) -> None:
    turn = parse(text)
    assert (turn.content, turn.tool_calls, turn.errors) == (text, (), ())


def test_tags_allow_text_before_the_calls() -> None:
    turn = parse("see <|python_start|> [f(x=1)] <|python_end|> then")
    assert turn.tool_calls == (ToolCall(name="f", arguments={"x": 1}),)
    assert turn.content == "see\nthen"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[f(1)]", "keywords"),
        ("[f(x=1", "expected"),
        ("[f(x=1)", "expected"),
        ("[f(x=g())]", "not a literal"),
        ("[f(x=a+1)]", "not a literal"),
        ("[f(x=1+1)]", "expected"),
        ("[f(x='a)]", "never closed"),
        ("[f(x={1: 2})]", "key of a dict"),
        ("[f(x={'a' 2})]", "':'"),
        ("[f(x=[1 2])]", "','"),
        ("[f(x=1e999)]", "too large"),
        ("[f(x=" + "9" * 5000 + ")]", "digits"),
        ("[f(x=" + "[" * 100_000, "deep"),
        ("[f(x=1), 3]", "name of a tool"),
        ("[f(x=1), g]", "'('"),
        ("<|python_start|>f(x=1)<|python_end|>", "'['"),
        ("<|python_start|>[]<|python_end|>", "empty"),
    ],
)
def test_what_is_not_a_list_of_calls_is_one_error(text: str, reason: str) -> None:  # A7
    turn = parse(text)
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1
    assert reason in turn.errors[0].message
