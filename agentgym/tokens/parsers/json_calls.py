"""Calls written as JSON objects: found with a decoder, so that tags and braces inside of strings stay text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from agentgym.types import ParseError, ToolCall

from .base import skip_space

_SEPARATOR = re.compile(r"[\s,;]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


# strict=False: models write real newlines in strings, above all in code.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_no_constant)
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Malformed:
    """JSON that could not be read: why, and the position where it went wrong."""

    reason: str
    pos: int


def decode(text: str, pos: int) -> tuple[Any, int] | Malformed:
    """The JSON value at ``pos`` and the position after it."""
    try:
        value, end = _DECODER.raw_decode(text, pos)
    except json.JSONDecodeError as error:
        return Malformed(f"{error.msg} at character {error.pos - pos}", max(error.pos, pos))
    except RecursionError:
        return Malformed("it is nested too deeply", pos)
    except ValueError as error:
        return Malformed(str(error), pos)
    if text.count("[", pos, end) + text.count("{", pos, end) > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        return Malformed(f"it is nested more than {_MAX_DEPTH} deep", pos)
    if text.find("\\u", pos, end) >= 0:  # only an escape can make half a character, and no tokenizer encodes that
        value = _whole_characters(value)
    return value, end


def decode_values(text: str, pos: int) -> Iterator[tuple[Any, int] | Malformed]:
    """All JSON values from ``pos`` on, apart by white space, commas or semicolons; arrays give their items.

    Ends before the first thing that does not open an object or an array, or after a `Malformed`.
    """
    while (pos := skip_space(text, pos, _SEPARATOR)) < len(text) and text[pos] in "{[":
        found = decode(text, pos)
        if isinstance(found, Malformed):
            yield found
            return
        value, pos = found
        if isinstance(value, list):
            for item in value:
                yield item, pos
        else:
            yield value, pos


def to_call(value: Any, raw: str) -> ToolCall | ParseError:
    """A decoded object as a call: ``name`` and ``arguments`` (or ``parameters``: an object, or a JSON string of one;
    empty, null and absent mean no arguments)."""
    if not isinstance(value, dict):
        return ParseError(
            message=f'A tool call must be a JSON object with "name" and "arguments", not {kind(value)}.', raw=raw
        )
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ParseError(message='The tool call has no "name": it must be the name of a tool, as a string.', raw=raw)
    given = value.get("arguments")
    arguments = read_arguments(given if given is not None else value.get("parameters"))
    if isinstance(arguments, str):
        return ParseError(message=f"The arguments of {name.strip()!r} {arguments}", raw=raw)
    return ToolCall(name=name.strip(), arguments=arguments)


def read_arguments(given: Any) -> dict[str, Any] | str:
    """The arguments as a dict, or what is wrong with them."""
    if isinstance(given, str):
        begin = skip_space(given, 0)
        if begin == len(given):
            return {}
        found = decode(given, begin)
        if isinstance(found, Malformed):
            return f"are not valid JSON: {found.reason}."
        value, end = found
        if skip_space(given, end) != len(given):
            return f"are not valid JSON: unexpected text at character {end}."
        given = value
    if given is None:
        return {}
    if isinstance(given, dict):
        return given
    return f"must be a JSON object, not {kind(given)}."


def kind(value: Any) -> str:
    """The JSON type of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def dumps(value: Any) -> str:
    """JSON as models see it: non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def dump_call(call: ToolCall, key: str = "arguments") -> str:
    """A call as one JSON object, its arguments under ``key``."""
    return dumps({"name": call.name, key: dict(call.arguments)})


def _depth(value: Any) -> int:
    """How deep arrays and objects are nested, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value
