from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.tokens import Renderer
from agentgym.tokens.encoding import Encoder, _alternatives, unused_mark

WORDS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=5)


@given(words=WORDS, text=st.text("ab<", max_size=20))
def test_the_prefix_tree_finds_what_a_plain_alternation_finds(words: list[str], text: str) -> None:
    found = re.search(_alternatives(words), text)
    plain = re.search("|".join(re.escape(word) for word in words), text)
    assert (found and found.start()) == (plain and plain.start())


@given(words=st.lists(st.text("ab<", min_size=2, max_size=4), min_size=1, max_size=5), text=st.text("ab<", max_size=20))
def test_no_piece_of_marked_text_holds_a_word(
    words: list[str], text: str, renderers: dict[str, Renderer]
) -> None:  # overlaps included
    encoder = Encoder(renderers["chatml"].tokenizer)
    pieces = encoder.mark(text, encoder.pattern(words), "|").split("|")
    assert "".join(pieces) == text
    assert not any(word in piece for word in words for piece in pieces)
    if not any(word in text for word in words):
        assert pieces == [text]


def test_white_space_and_single_characters_are_left_alone(make_tokenizer: Any) -> None:
    encoder = Encoder(make_tokenizer("x", ("</s>",), ("   ", "#")))
    pattern = encoder.pattern()
    assert pattern is not None
    assert encoder.mark("#   #</s>", pattern, "|") == "#   #<|/s>"


@pytest.mark.parametrize("texts", [[], ["\ufdd00\ufdd1"], ["a\ufdd01\ufdd1", "\ufdd00\ufdd1"]])
def test_marks_occur_in_no_text(texts: list[str]) -> None:
    assert not any(unused_mark(*texts) in text for text in texts)
