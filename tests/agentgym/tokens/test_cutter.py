from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.tokens import Renderer

SIDES = ["left", "right", "middle"]
TEXT = " ".join(f"{i}:the result of the expression" for i in range(50))


@pytest.mark.parametrize("side", SIDES)
def test_the_marker_says_how_many_tokens_were_dropped(side: str, renderers: dict[str, Renderer]) -> None:  # B12
    cutter = renderers["chatml"].cutter
    cut = cutter.cut(TEXT, 60, side)
    assert cutter.count(cut) <= 60
    match = re.search(r"\[\.\.\. (\d+) tokens cut \.\.\.\]", cut)
    assert match is not None
    before, after = cut[: match.start()], cut[match.end() :]
    assert TEXT.startswith(before)
    assert TEXT.endswith(after)
    assert (before == "") == (side == "left")
    assert (after == "") == (side == "right")
    dropped = cutter.count(TEXT) - cutter.count(before) - cutter.count(after)
    assert abs(dropped - int(match[1])) <= 1  # a token at the edge may be encoded in another way when it stands alone


def test_text_within_the_limit_is_unchanged(renderers: dict[str, Renderer]) -> None:  # B12
    cutter = renderers["chatml"].cutter
    assert cutter.cut(TEXT, cutter.count(TEXT)) == TEXT
    assert cutter.cut(TEXT, cutter.count(TEXT) - 1) != TEXT


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=120) | st.lists(st.sampled_from(["<|im_end|>", "🎯", "日", "a", " "])).map("".join),
    limit=st.integers(-1, 80),
    side=st.sampled_from(SIDES),
)
def test_the_result_is_within_the_limit(
    text: str, limit: int, side: str, renderers: dict[str, Renderer]
) -> None:  # B12
    cutter = renderers["chatml"].cutter
    cut = cutter.cut(text, limit, side)
    assert cutter.count(cut) <= max(limit, 0)
    assert cutter.cut(text, limit, side) == cut
    if cut != text:
        assert all(cut.count(character) <= text.count(character) for character in "🎯日")


def test_the_marker_gets_shorter_where_there_is_no_room(renderers: dict[str, Renderer]) -> None:  # B12
    cutter = renderers["chatml"].cutter
    markers = [re.sub(r"\d+", "N", "".join(re.findall(r"\[.*\]", cutter.cut(TEXT, limit)))) for limit in range(40)]
    assert markers[39] == "[... N tokens cut ...]"
    assert markers[3] == ""
    assert sorted(set(markers), key=markers.index) == ["", "[N cut]", "[... N tokens cut ...]"]


def test_control_tokens_count_as_the_text_they_become(renderers: dict[str, Renderer]) -> None:  # B13
    renderer = renderers["chatml"]
    text = "ok<|im_end|>" * 20
    with_text = renderer.prompt([{"role": "user", "content": "." + text}], None)
    without = renderer.prompt([{"role": "user", "content": "."}], None)
    assert renderer.cutter.count(text) == len(with_text) - len(without)


def test_an_unknown_side_is_refused(renderers: dict[str, Renderer]) -> None:
    with pytest.raises(ConfigError, match="'centre': expected one of left, right, middle"):
        renderers["chatml"].cutter.cut("a", 1, "centre")
