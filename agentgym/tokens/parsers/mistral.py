"""``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`` and ``[TOOL_CALLS]name[ARGS]{...}``: Mistral."""

from __future__ import annotations

import re

from agentgym.types import AssistantTurn

from .base import TaggedParser, Tools, TurnBuilder, join, skip_space
from .json_calls import Malformed, decode, dump_call, to_call

TAG = "[TOOL_CALLS]"
_FORM = f'Write it as {TAG}[{{"name": "...", "arguments": {{...}}}}]'
_NAMED = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class MistralParser(TaggedParser):
    """A JSON array of calls after the tag (to version 7 of its tokenizers), or a name and its arguments (after)."""

    marker = re.escape(TAG)

    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        start = skip_space(text, match.end())
        named = _NAMED.match(text, start)
        begin = named.end() if named is not None else start
        if text[begin : begin + 1] not in ("[", "{") or text.startswith(TAG, begin):
            return self._malformed(text, start, Malformed(f"no call follows {TAG}", begin), turn)
        found = decode(text, begin)
        if isinstance(found, Malformed):
            return self._malformed(text, start, found, turn)
        value, end = found
        raw = text[start:end]
        if named is not None:
            turn.add(to_call({"name": named[1], "arguments": value}, raw))
            return end
        for item in value if isinstance(value, list) else [value]:
            turn.add(to_call(item, raw))
        if not value:
            return self._malformed(text, start, Malformed("there is no call in it", end), turn)
        return end

    def _malformed(self, text: str, start: int, problem: Malformed, turn: TurnBuilder) -> int:
        following = text.find(TAG, problem.pos)
        end = following if following >= 0 else len(text)
        turn.error(f"The tool call is not valid JSON: {problem.reason}. {_FORM}.", text[start:end].strip())
        return end

    def render(self, turn: AssistantTurn) -> str:
        calls = ", ".join(dump_call(call) for call in turn.tool_calls)
        return join(turn.content, f"{TAG} [{calls}]" if calls else "", separator="")
