"""What all tool-call parsers share: the result, the search for calls outside of thinking, the upkeep of plain text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentgym.types import AssistantTurn, ParseError, ToolCall

Tools = Sequence[Mapping[str, Any]]
"""OpenAI function schemas: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

THINK = "<think>"
END_THINK = "</think>"
_THINK_TAG = re.compile(r"</?think>")

MAX_ERRORS = 16
"""Malformed calls reported per turn; the text after that many is not read. A turn full of garbage is answered with a
few messages, and the cost of reading it stays linear in its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a parser found in the text of one turn.

    Example:
        ``<tool_call>{"name": "now"}</tool_call>`` gives ``content=""``, one `ToolCall` and no errors.
    """

    content: str
    """The text outside of calls, thinking included. Unchanged where the text holds neither calls nor errors; otherwise
    the pieces between calls without outer white space, joined by newlines."""
    tool_calls: Sequence[ToolCall] = ()
    errors: Sequence[ParseError] = ()


class TurnBuilder:
    """Collects what a parser finds while it walks through a text."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.errors: list[ParseError] = []
        self.pieces: list[str] = []

    @property
    def full(self) -> bool:
        return len(self.errors) >= MAX_ERRORS

    def add(self, found: ToolCall | ParseError) -> None:
        if isinstance(found, ToolCall):
            self.calls.append(found)
        else:
            self.errors.append(found)

    def error(self, message: str, raw: str) -> None:
        self.errors.append(ParseError(message=message, raw=raw))

    def clear(self) -> None:
        self.calls.clear()
        self.errors.clear()
        self.pieces.clear()

    def build(self, text: str) -> ParsedTurn:
        if not self.calls and not self.errors:
            return ParsedTurn(content=text)
        pieces = (piece.strip() for piece in self.pieces)
        content = "\n".join(piece for piece in pieces if piece)
        return ParsedTurn(content=content, tool_calls=tuple(self.calls), errors=tuple(self.errors))


class ToolParser(ABC):
    """Reads the tool calls out of a model's text, and writes them.

    A pure function of the text: it never raises, keeps no state, and leaves ids of calls empty (the loop sets them).
    """

    @abstractmethod
    def parse(self, text: str, tools: Tools | None = None) -> ParsedTurn:
        """Find the calls in ``text``; ``tools`` tells formats without types what an argument should be."""

    @abstractmethod
    def render(self, turn: AssistantTurn) -> str:
        """The text of ``turn`` in this format: ``parse(render(turn))`` gives its content and calls back.

        Errors of the turn are not written. Content that holds tags of the format, or outer white space beside calls,
        cannot be told apart from them.
        """


class TaggedParser(ToolParser):
    """A parser for formats whose calls follow a marker, or open the text without one.

    Subclasses give `marker`, `read` and, for calls without a marker, `read_bare`. Calls inside ``<think>...</think>``
    are drafts and are not read, also where the block is never closed. A ``</think>`` without an opening closes a block
    that the prompt had opened: everything before it was thinking.
    """

    marker: ClassVar[str]
    """Regular expression of what opens a call."""
    _tags: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tags = re.compile(f"(?P<think></?think>)|(?:{cls.marker})")

    @abstractmethod
    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        """Read what follows the marker ``match`` into ``turn``; the position after it, beyond the marker's start."""

    def read_bare(self, text: str, pos: int, turn: TurnBuilder, tools: Tools | None) -> int:
        """Read calls that stand at ``pos``, where the answer begins, without a marker; ``pos`` if there are none."""
        return pos

    def parse(self, text: str, tools: Tools | None = None) -> ParsedTurn:
        turn = TurnBuilder()
        thinking: Thinking | None = None
        start = pos = self._answer(text, 0, 0, turn, tools)
        while not turn.full and (match := self._tags.search(text, pos)) is not None:
            if match["think"] is None:
                turn.pieces.append(text[start : match.start()])
                start = pos = self.read(text, match, turn, tools)
                continue
            opened = thinking is not None
            thinking = thinking or Thinking(text)
            if match["think"] == THINK:
                pos = thinking.end(match.start())
            elif opened:  # a second closing tag is text
                pos = match.end()
                continue
            else:
                turn.clear()
                start, pos = 0, match.end()
            end = self._answer(text, start, pos, turn, tools)
            if end != pos:
                start = pos = end
        turn.pieces.append(text[start:])
        return turn.build(text)

    def _answer(self, text: str, start: int, pos: int, turn: TurnBuilder, tools: Tools | None) -> int:
        """Try to read calls without a marker at ``pos``; the text from ``start`` is not yet in a piece."""
        begin = skip_space(text, pos)
        end = self.read_bare(text, begin, turn, tools)
        if end == begin:
            return pos
        turn.pieces.append(text[start:begin])
        return end


class Thinking:
    """Where the thinking blocks of a text end; found once, in one pass."""

    def __init__(self, text: str) -> None:
        self._length = len(text)
        self._match: dict[int, int] = {}
        self._closes: list[int] = []
        opened: list[int] = []
        for tag in _THINK_TAG.finditer(text):
            if tag.group() == THINK:
                opened.append(tag.start())
                continue
            self._closes.append(tag.start())
            if opened:
                self._match[opened.pop()] = tag.end()

    def end(self, start: int) -> int:
        """The position after the block that opens at ``start``: its own closing tag (blocks nest), else the first one
        after it (the tag was only mentioned), else the end of the text (never closed)."""
        if start in self._match:
            return self._match[start]
        i = bisect_left(self._closes, start)
        return self._closes[i] + len(END_THINK) if i < len(self._closes) else self._length


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking blocks of a text, tags included, and the rest of it."""
    thinking = Thinking(text)
    blocks, rest, pos = [], [], 0
    first = _THINK_TAG.search(text)
    if first is not None and first.group() == END_THINK:  # the prompt had opened the block
        blocks.append(text[: first.end()])
        pos = first.end()
    while (start := text.find(THINK, pos)) >= 0:
        rest.append(text[pos:start])
        pos = thinking.end(start)
        blocks.append(text[start:pos])
    return "".join(blocks), "".join([*rest, text[pos:]])


_SPACE = re.compile(r"\s*")


def skip_space(text: str, pos: int, pattern: re.Pattern[str] = _SPACE) -> int:
    """The first position from ``pos`` on that is not white space (or not matched by ``pattern``)."""
    match = pattern.match(text, pos)
    return match.end() if match is not None else pos


def join(content: str, *blocks: str, separator: str = "\n") -> str:
    """Content and call blocks, without an empty line where there is no content."""
    return separator.join(part for part in (content, *blocks) if part)
