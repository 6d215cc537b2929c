from __future__ import annotations

import dataclasses
import datetime
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentgym.tool_results import ByteCutter, CutSide, ToolResult, as_response, join_responses, read_result
from agentgym.types import ToolCall, ToolResponse


class Model(BaseModel):
    a: int


@dataclasses.dataclass
class Data:
    a: int


class Kind(Enum):
    A = "a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ({"a": 1}, '{"a": 1}'),
        ([1, "x", None], '[1, "x", null]'),
        (3.0, "3.0"),
        (3, "3"),
        (True, "true"),
        (False, "false"),
        (None, ""),
        (b"bytes \xff", "bytes �"),
        (bytearray(b"ok"), "ok"),
        ({"t": "5 < 7 & 日本"}, '{"t": "5 < 7 & 日本"}'),  # A16
        ("lone \ud83d surrogate", "lone ? surrogate"),
        ({"t": "\ud83d"}, '{"t": "?"}'),
        (Model(a=1), '{"a": 1}'),
        ([Data(a=2), Kind.A, datetime.date(2024, 2, 29), {5}], '[{"a": 2}, "a", "2024-02-29", [5]]'),
        (np.int64(4), "4"),
        (np.float64(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        (ToolResponse(), ""),
        (ToolResponse(text="t"), "t"),
    ],
)
def test_text_of_returned_values(value: Any, text: str) -> None:  # B15
    assert as_response(value, "f").text == text


def test_response_keeps_images() -> None:
    assert as_response(ToolResponse(image=["i"], video=["v"]), "f") == ToolResponse(text="", image=["i"], video=["v"])


@pytest.mark.parametrize("value", [object(), {"a": object()}, {1, 2, object()}, {(1, 2): 3}, ToolResponse(text=3)])  # type: ignore[arg-type]
def test_values_without_a_json_form_are_a_fault_that_names_the_tool(value: Any) -> None:
    with pytest.raises(TypeError, match="tool 'f' returned a "):
        as_response(value, "f")


def test_circular_data_is_a_fault() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="no JSON form"):
        as_response(value, "f")


def test_tuples_carry_reward_and_metrics() -> None:
    assert read_result(("a", 1), "f") == (ToolResponse(text="a"), 1.0, {})
    assert read_result(({"b": 1}, None, None), "f") == (ToolResponse(text='{"b": 1}'), None, {})
    assert read_result((None, np.float32(0.5), {"n": 2}), "f") == (ToolResponse(text=""), 0.5, {"n": 2})
    assert read_result([1, 2], "f") == (ToolResponse(text="[1, 2]"), None, {})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (("a",), "tuple of 1"),
        (("a", 1, {}, 2), "tuple of 4"),
        (("a", "b"), "reward 'b'"),
        (("a", 1.0, [1]), r"metrics \[1\]"),
    ],
)
def test_other_tuples_are_a_fault(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        read_result(value, "f")


def test_message_of_text_and_of_parts() -> None:
    call = ToolCall(name="f", arguments={}, id="call00001")
    text = ToolResult(call=call, response=ToolResponse(text="t"), metrics={})
    assert text.message() == {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "t"}
    parts = ToolResult(call=call, response=ToolResponse(text="t", image=["i"], video=["v"]), metrics={})
    assert parts.message()["content"] == [
        {"type": "text", "text": "t"},
        {"type": "image", "image": "i"},
        {"type": "video", "video": "v"},
    ]
    assert ToolResult(call=call, response=ToolResponse(), metrics={}).message()["content"] == ""


def test_joined_responses() -> None:
    first, second = ToolResponse(text="a", image=[1]), ToolResponse(text="b", image=[2])
    assert join_responses(first, second) == ToolResponse(text="a\nb", image=[1, 2], video=[])
    assert join_responses(ToolResponse(), second).text == "b"


TEXT = "0123456789ABCDEFGHIJ" * 10  # 200 bytes, 50 tokens


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("right", "0123456789ABCDEF[... 46 tokens cut ...]"),
        ("left", "[... 46 tokens cut ...]456789ABCDEFGHIJ"),
        ("middle", "01234567[... 46 tokens cut ...]CDEFGHIJ"),
    ],
)
def test_cut_drops_the_named_side_and_says_how_much(side: CutSide, expected: str) -> None:  # B12
    assert ByteCutter().cut(TEXT, 10, side) == expected


def test_a_small_limit_has_a_small_marker_or_none() -> None:
    assert [ByteCutter().cut(TEXT, limit, "right") for limit in (4, 3, 1)] == ["0123456[49 cut]", "012[50 cut]", "0123"]


def test_text_at_the_limit_is_not_cut() -> None:
    assert ByteCutter().cut(TEXT, 50, "middle") == TEXT
    assert ByteCutter().cut(TEXT + "x", 50, "middle") != TEXT + "x"


@given(text=st.text(max_size=200), limit=st.integers(1, 40), side=st.sampled_from(["left", "right", "middle"]))
def test_cut_text_has_at_most_the_limit_and_whole_characters(text: str, limit: int, side: CutSide) -> None:
    cut = ByteCutter().cut(text, limit, side)
    if len(text.encode()) <= 4 * limit:
        assert cut == text
        return
    assert len(cut.encode()) <= 4 * limit
    if limit >= 8:
        head, _, rest = cut.partition("[... ")
        count, _, tail = rest.partition(" tokens cut ...]")
        assert text.startswith(head)
        assert text.endswith(tail)
        dropped = len(text.encode()) - len((head + tail).encode())
        assert int(count) == -(-dropped // 4)
