"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5 and Qwen3."""

from __future__ import annotations

import re

from agentgym.types import AssistantTurn

from .base import TaggedParser, Tools, TurnBuilder, join, skip_space
from .json_calls import Malformed, decode_values, dump_call, to_call

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FORM = f'Write it as {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'


class HermesParser(TaggedParser):
    """One or more JSON objects per tag. A closing tag may be missing; text after an object and before the closing tag
    is an error beside the call."""

    marker = OPEN

    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        pos, found = match.end(), 0
        for item in decode_values(text, pos):
            if isinstance(item, Malformed):
                end = closing(text, item.pos)
                reason = f"The tool call is not valid JSON: {item.reason}. {_FORM}."
                turn.error(reason, text[match.start() : end])
                return end
            value, end = item
            turn.add(to_call(value, text[pos:end].strip()))
            pos, found = end, found + 1
        pos = skip_space(text, pos)
        if text.startswith(CLOSE, pos) and found:
            return pos + len(CLOSE)
        following = text.find(OPEN, pos)
        close = text.find(CLOSE, pos, following if following >= 0 else len(text))
        if found and close < 0:  # the closing tag is missing: what follows is text
            return pos
        end = close + len(CLOSE) if close >= 0 else following if following >= 0 else len(text)
        raw = text[match.start() : end]
        if found:
            turn.error(f"Unexpected text after a tool call: {text[pos:close].strip()[:80]!r}. {_FORM}.", raw)
        else:
            turn.error(f"The tool call holds no JSON object. {_FORM}.", raw)
        return end

    def render(self, turn: AssistantTurn) -> str:
        return join(turn.content, *(f"{OPEN}\n{dump_call(call)}\n{CLOSE}" for call in turn.tool_calls))


def closing(text: str, pos: int) -> int:
    """The position after the next closing tag, or the end of the text."""
    close = text.find(CLOSE, pos)
    return close + len(CLOSE) if close >= 0 else len(text)
