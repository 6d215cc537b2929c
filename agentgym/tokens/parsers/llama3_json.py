"""``<|python_tag|>{"name": ..., "parameters": {...}}``, with or without the tag: Llama 3.1 and later."""

from __future__ import annotations

import re

from agentgym.types import AssistantTurn

from .base import TaggedParser, Tools, TurnBuilder, join, skip_space
from .json_calls import Malformed, decode_values, dump_call, to_call

TAG = "<|python_tag|>"
_FORM = 'Write it as {"name": "...", "parameters": {...}}'
_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})
_LOOKS_LIKE_CALL = re.compile(r"""\[?\s*\{\s*(["'])(?:name|parameters|arguments|type)\1\s*:""")


class Llama3JsonParser(TaggedParser):
    """JSON objects after the tag, or as the whole answer; several are apart by semicolons or white space.

    Without the tag an object is a call only if it stands where the answer begins and has no keys but those of a call:
    an answer in JSON stays an answer.
    """

    marker = re.escape(TAG)

    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        end = self._read_objects(text, match.end(), turn)
        if end == match.end():
            following = text.find(TAG, end)
            end = following if following >= 0 else len(text)
            turn.error(f"Expected a JSON object after {TAG}. {_FORM}.", text[match.start() : end])
        return end

    def read_bare(self, text: str, pos: int, turn: TurnBuilder, tools: Tools | None) -> int:
        if _LOOKS_LIKE_CALL.match(text, pos) is None:
            return pos
        first = next(decode_values(text, pos))
        if not isinstance(first, Malformed) and not _is_call(first[0]):
            return pos
        return self._read_objects(text, pos, turn)

    def _read_objects(self, text: str, pos: int, turn: TurnBuilder) -> int:
        """Add the objects from ``pos`` on; the position after the last one."""
        for item in decode_values(text, pos):
            if isinstance(item, Malformed):
                following = text.find(TAG, item.pos)
                end = following if following >= 0 else len(text)
                turn.error(f"The tool call is not valid JSON: {item.reason}. {_FORM}.", text[pos:end].strip())
                return end
            value, end = item
            turn.add(to_call(value, text[pos:end].strip()))
            pos = end
        separator = skip_space(text, pos)
        return separator + 1 if text.startswith(";", separator) else pos

    def render(self, turn: AssistantTurn) -> str:
        calls = "; ".join(dump_call(call, "parameters") for call in turn.tool_calls)
        return join(turn.content, TAG + calls if calls else "")


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and value.keys() <= _KEYS
