"""``[get_weather(city="Rome"), now()]``: a Python list of calls, as in Llama 3.2 and 4."""

from __future__ import annotations

import re

from agentgym.types import AssistantTurn, ToolCall

from .base import TaggedParser, Tools, TurnBuilder, join, skip_space
from .literals import NAME, LiteralError, read_literal

START = "<|python_start|>"
END = "<|python_end|>"
_FORM = "Write it as [name(key=value, ...)]"
_CALLS = re.compile(r"\[\s*(?:[^\W\d]\w*)(?:\.[^\W\d]\w*)*\s*\(")
_CALL_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


class PythonicParser(TaggedParser):
    """The list stands where the answer begins, or after ``<|python_start|>``. Arguments are keywords with literal
    values; nothing is evaluated."""

    marker = re.escape(START)

    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        end = self._read_list(text, skip_space(text, match.end()), turn)
        after = skip_space(text, end)
        return after + len(END) if text.startswith(END, after) else end

    def read_bare(self, text: str, pos: int, turn: TurnBuilder, tools: Tools | None) -> int:
        return self._read_list(text, pos, turn) if _CALLS.match(text, pos) is not None else pos

    def _read_list(self, text: str, start: int, turn: TurnBuilder) -> int:
        try:
            calls, end = _read_calls(text, start)
        except LiteralError as error:
            stop = text.find(END, error.pos)
            end = stop if stop >= 0 else len(text)
            turn.error(f"The tool calls cannot be read: {error}. {_FORM}.", text[start:end])
            return end
        turn.calls.extend(calls)
        return end

    def render(self, turn: AssistantTurn) -> str:
        calls = ", ".join(
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
            for call in turn.tool_calls
        )
        if not calls or not turn.content:
            return f"[{calls}]" if calls else turn.content
        return join(turn.content, f"{START}[{calls}]{END}")


def _read_calls(text: str, pos: int) -> tuple[list[ToolCall], int]:
    if not text.startswith("[", pos):
        raise LiteralError("expected '['", pos)
    calls: list[ToolCall] = []
    pos = skip_space(text, pos + 1)
    while not text.startswith("]", pos):
        call, pos = _read_call(text, pos)
        calls.append(call)
        pos = skip_space(text, pos)
        if text.startswith(",", pos):
            pos = skip_space(text, pos + 1)
        elif not text.startswith("]", pos):
            raise LiteralError(f"expected ',' or ']' after the call of {call.name!r}", pos)
    if not calls:
        raise LiteralError("the list of calls is empty", pos)
    return calls, pos + 1


def _read_call(text: str, pos: int) -> tuple[ToolCall, int]:
    name = _CALL_NAME.match(text, pos)
    if name is None:
        raise LiteralError("expected the name of a tool", pos)
    pos = skip_space(text, name.end())
    if not text.startswith("(", pos):
        raise LiteralError(f"expected '(' after {name.group()!r}", pos)
    arguments: dict[str, object] = {}
    pos = skip_space(text, pos + 1)
    while not text.startswith(")", pos):
        key = NAME.match(text, pos)
        equals = skip_space(text, key.end()) if key is not None else pos
        if key is None or not text.startswith("=", equals):
            raise LiteralError(f"the arguments of {name.group()!r} must be keywords: key=value", pos)
        arguments[key.group()], pos = read_literal(text, skip_space(text, equals + 1))
        pos = skip_space(text, pos)
        if text.startswith(",", pos):
            pos = skip_space(text, pos + 1)
        elif not text.startswith(")", pos):
            raise LiteralError(f"expected ',' or ')' after the value of {key.group()!r}", pos)
    return ToolCall(name=name.group(), arguments=arguments), pos + 1
