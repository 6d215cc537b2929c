"""Python literals read from untrusted text: no evaluation, bounded depth, no warnings, linear time."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from .base import skip_space

NAME = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_STRINGS = {
    "'": re.compile(r"'([^'\\]*+(?:\\.[^'\\]*+)*+)'", re.DOTALL),
    '"': re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL),
    "'''": re.compile(r"'''([^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*+)'''", re.DOTALL),
    '"""': re.compile(r'"""([^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+)"""', re.DOTALL),
}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|N\{([^{}]{1,80})\}|(.))", re.DOTALL
)
_SIMPLE = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 64


class LiteralError(ValueError):
    """The text at ``pos`` is not what was expected."""

    def __init__(self, message: str, pos: int) -> None:
        super().__init__(message)
        self.pos = pos


def read_literal(text: str, pos: int, depth: int = 0) -> tuple[Any, int]:
    """The literal at ``pos`` and the position after it: strings, numbers, lists, tuples (as lists), dicts, True, False,
    None and their JSON spellings. Raises `LiteralError`."""
    if depth > _MAX_DEPTH:
        raise LiteralError("the value is nested too deeply", pos)
    first = text[pos : pos + 1]
    if first in ("'", '"'):
        return _read_string(text, pos, raw=False)
    if first == "[":
        return _read_sequence(text, pos + 1, "]", depth)
    if first == "(":
        return _read_sequence(text, pos + 1, ")", depth)
    if first == "{":
        return _read_dict(text, pos + 1, depth)
    number = _NUMBER.match(text, pos)
    if number is not None:
        return _to_number(number.group(), pos), number.end()
    word = NAME.match(text, pos)
    if word is None:
        raise LiteralError(f"expected a value at {text[pos : pos + 20]!r}", pos)
    if word.group() in _WORDS:
        return _WORDS[word.group()], word.end()
    if word.group() in ("r", "R") and text[word.end() : word.end() + 1] in ("'", '"'):
        return _read_string(text, word.end(), raw=True)
    raise LiteralError(f"{word.group()[:40]!r} is not a literal value", pos)


def _read_string(text: str, pos: int, *, raw: bool) -> tuple[str, int]:
    quote = text[pos]
    match = _STRINGS[quote * 3 if text.startswith(quote * 3, pos) else quote].match(text, pos)
    if match is None:
        raise LiteralError("a string is never closed", pos)
    return match[1] if raw else _ESCAPE.sub(_unescape, match[1]), match.end()


def _unescape(match: re.Match[str]) -> str:
    if match[6] is not None:
        return _SIMPLE.get(match[6], match.group())
    if match[5] is not None:
        try:
            return unicodedata.lookup(match[5])
        except KeyError:
            return match.group()
    digits = match[1] or match[2] or match[3]
    code = int(digits, 16) if digits is not None else int(match[4], 8)
    # Half a character cannot be encoded by any tokenizer.
    return "\ufffd" if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF else chr(code)


def _to_number(digits: str, pos: int) -> int | float:
    try:
        if not any(c in digits for c in ".eE"):
            return int(digits)
        number = float(digits)
        if math.isinf(number):
            raise ValueError("it is too large")
        return number
    except ValueError as error:
        raise LiteralError(f"the number {digits[:40]} cannot be read: {error}", pos) from error


def _read_sequence(text: str, pos: int, end: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    pos = skip_space(text, pos)
    while not text.startswith(end, pos):
        item, pos = read_literal(text, pos, depth + 1)
        items.append(item)
        pos = _next(text, pos, end)
    return items, pos + 1


def _read_dict(text: str, pos: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    pos = skip_space(text, pos)
    while not text.startswith("}", pos):
        key, colon = read_literal(text, pos, depth + 1)
        if not isinstance(key, str):
            raise LiteralError("the key of a dict must be a string", pos)
        colon = skip_space(text, colon)
        if not text.startswith(":", colon):
            raise LiteralError("expected ':' after the key of a dict", colon)
        items[key], pos = read_literal(text, skip_space(text, colon + 1), depth + 1)
        pos = _next(text, pos, "}")
    return items, pos + 1


def _next(text: str, pos: int, end: str) -> int:
    """The position of the next item or of the closing bracket."""
    pos = skip_space(text, pos)
    if text.startswith(",", pos):
        return skip_space(text, pos + 1)
    if text.startswith(end, pos):
        return pos
    raise LiteralError(f"expected ',' or {end!r}", pos)
