"""Rules that hold for every tool-call parser."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.tokens import get_parser
from agentgym.types import AssistantTurn, ToolCall

FORMATS = ["hermes", "llama3_json", "qwen3_xml", "mistral", "pythonic"]
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>",
    '{"name": "f", "arguments": ', '{"x": 1}', "{", "}", "[", "]",
    '"', "'", "\\", ",", ";", ":", "(", ")", "=", "\n", " ", "null", "NaN", "1e999", "9" * 5000, "-", "\\ud800",
    "é東🎯",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=f>", "</function>", "<parameter=x>",
    "</parameter>", "<|python_start|>", "<|python_end|>", "[f(x=", "f(", "name", "parameters", "\x00", "#### 42",
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', '\\"', '"""', "r'", "\\N{DIGIT ONE}",
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"properties": {"x": {"type": "integer"}}}},
    }
]


def call(expression: str) -> ToolCall:
    return ToolCall(name="calculator", arguments={"expression": expression})


def written(name: str, *expressions: str) -> str:
    """Calls of the calculator in the format ``name``."""
    return get_parser(name).render(AssistantTurn(tool_calls=[call(expression) for expression in expressions]))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_text_parses(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=25)))
    turn = get_parser(name).parse(text, data.draw(st.sampled_from([None, [], TOOLS])))
    assert turn == get_parser(name).parse(text, None) or name == "qwen3_xml"
    if not turn.tool_calls and not turn.errors:
        assert turn.content == text
    for found in turn.tool_calls:
        assert found.name == found.name.strip() != ""
        assert found.id == ""
        repr(found.arguments).encode()  # no half characters, which no tokenizer takes


@pytest.mark.parametrize("name", FORMATS)
@given(content=st.text(alphabet=st.characters(exclude_characters="<[{", exclude_categories=("Cs",))))
def test_text_without_calls_is_the_content_unchanged(name: str, content: str) -> None:
    parser = get_parser(name)
    turn = parser.parse(parser.render(AssistantTurn(content=content)))
    assert (turn.content, turn.tool_calls, turn.errors) == (content, (), ())


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
KEYS = dict.fromkeys(FORMATS, NAMES) | {"hermes": st.text(), "llama3_json": st.text(), "mistral": st.text()}
# The XML format has no types and no escapes: strings without its tags.
CONTENT = st.text(st.characters(exclude_characters="<[{", exclude_categories=("Cs",))).map(str.strip)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_parse_inverts_render(name: str, data: st.DataObject) -> None:
    values = (
        st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",))) if name == "qwen3_xml" else VALUES
    )
    calls = st.builds(
        lambda n, a: ToolCall(name=n, arguments=a), NAMES, st.dictionaries(KEYS[name], values, max_size=3)
    )
    turn = AssistantTurn(
        content=data.draw(CONTENT), tool_calls=tuple(data.draw(st.lists(calls, min_size=1, max_size=3)))
    )
    parsed = get_parser(name).parse(get_parser(name).render(turn))
    assert (parsed.content, parsed.tool_calls, parsed.errors) == (turn.content, turn.tool_calls, ())


@pytest.mark.parametrize("name", FORMATS)
def test_calls_drafted_while_thinking_are_not_calls(name: str) -> None:  # A4
    parser = get_parser(name)
    closed = parser.parse(f"<think>maybe {written(name, '1/0')}</think>\n{written(name, '6*7')}")
    assert closed.tool_calls == (call("6*7"),)
    assert closed.errors == ()
    assert parser.parse(f"<think>maybe {written(name, '1/0')}").tool_calls == ()
    assert parser.parse(f"<think>\n{written(name, '1/0')}\n").tool_calls == ()


@pytest.mark.parametrize("name", FORMATS)
def test_a_thinking_block_that_the_prompt_opened_is_thinking(name: str) -> None:  # A4
    turn = get_parser(name).parse(f"{written(name, '1/0')} no </think>\n{written(name, '6*7')}")
    assert turn.tool_calls == (call("6*7"),)
    assert turn.content.endswith("</think>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a<think>b</think>{draft}</think>{call}", ["6*7"]),
        ("<think>the <think> tag</think>{call}", ["6*7"]),
        ("<think>a</think>{call}<think>{draft}</think>", ["6*7"]),
        ("<think>a</think>{call}<think>{draft}", ["6*7"]),
        ("<think>a</think> b </think>{call}", ["6*7"]),
        ("{call} see <think>", ["6*7"]),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "mistral"])
def test_thinking_tags_nest_and_may_only_be_mentioned(name: str, text: str, expected: list[str]) -> None:  # A4
    filled = text.replace("{draft}", written(name, "1/0")).replace("{call}", written(name, "6*7"))
    assert [found.arguments["expression"] for found in get_parser(name).parse(filled).tool_calls] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_keep_their_order(name: str) -> None:  # A5
    assert get_parser(name).parse(written(name, "1+1", "2+2", "3+3")).tool_calls == (
        call("1+1"),
        call("2+2"),
        call("3+3"),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_is_no_call(name: str) -> None:  # A6
    text = written(name, "12345*67890")
    turn = get_parser(name).parse(text[: text.index("*") + 1])
    assert turn.tool_calls == ()
    assert len(turn.errors) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_text_around_calls_is_the_content(name: str) -> None:
    turn = get_parser(name).parse(get_parser(name).render(AssistantTurn(content="Let me see.", tool_calls=[call("1")])))
    assert turn.content == "Let me see."


OPENINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": "',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"x": "',
    "qwen3_xml": "<tool_call><function=f><parameter=x>",
    "mistral": "[TOOL_CALLS]f",
    "pythonic": '[f(x="',
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "fragment",
    [
        "<tool_call>", '<tool_call>{"a":[', '<tool_call>{"name":"a"} x', '<tool_call>["', "<think>",
        "<think><think></think>",
        "</think>", "[",
        '{"name":"', '{"name":"a"}\n', "<|python_tag|>{", "[TOOL_CALLS][{", "[TOOL_CALLS]f{}", "[f(x=[",
        "<function=f><parameter=a>", "</parameter>   ", '<|python_start|>[f(x="', '"\\"', "x ", "[f(x=1),", "\\\\",
        "<function=f></function>", "[CALL_ID]a", "word",
    ],
)  # fmt: skip
def test_the_cost_is_linear_in_the_length(name: str, fragment: str) -> None:
    parser = get_parser(name)
    for prefix in ("", OPENINGS[name]):
        text = prefix + fragment * (500_000 // len(fragment))
        started = time.process_time()
        parser.parse(text)
        # A quadratic reader needs minutes for half a megabyte.
        assert time.process_time() - started < 2.0, prefix


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_a_turn_of_garbage_gives_few_errors(name: str) -> None:
    assert len(get_parser(name).parse("<tool_call>x</tool_call>" * 1000).errors) == 16
