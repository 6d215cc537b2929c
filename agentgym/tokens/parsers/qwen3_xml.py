"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentgym.types import AssistantTurn, ToolCall

from .base import TaggedParser, Tools, TurnBuilder, join, skip_space
from .json_calls import Malformed, decode, dumps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
END_FUNCTION = "</function>"
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
# The format has no escapes: a closing tag ends the value only where the next part of the call follows.
_END_PARAMETER = re.compile(r"</parameter>\s*(?=<parameter=|</function>|</tool_call>|\Z)")
_FORM = "Write it as <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"


class Qwen3XmlParser(TaggedParser):
    """Values are text; the schema of the tool says which of them are numbers, booleans, arrays or objects.

    The outer tag may be missing, as the models often leave it out.
    """

    marker = f"{OPEN}|<function=(?=[^<>\n]*>)"

    def read(self, text: str, match: re.Match[str], turn: TurnBuilder, tools: Tools | None) -> int:
        tagged = match.group() == OPEN
        pos, found = (match.end() if tagged else match.start()), 0
        while True:
            pos = skip_space(text, pos) if tagged or not found else pos
            function = _FUNCTION.match(text, pos)
            if function is None:
                break
            read = self._read_function(text, function, tools)
            if isinstance(read, Malformed):
                return self._malformed(text, match.start(), read, turn)
            call, pos = read
            turn.calls.append(call)
            found += 1
        if tagged and text.startswith(CLOSE, pos):
            pos += len(CLOSE)
            if found:
                return pos
        if found:
            return pos
        return self._malformed(text, match.start(), Malformed("it has no <function=NAME> part", match.end()), turn)

    def _read_function(
        self, text: str, function: re.Match[str], tools: Tools | None
    ) -> tuple[ToolCall, int] | Malformed:
        name, pos = function[1].strip(), function.end()
        if not name:
            return Malformed("the name of the function is missing", pos)
        types = _parameter_schemas(name, tools)
        arguments: dict[str, Any] = {}
        while True:
            pos = skip_space(text, pos)
            parameter = _PARAMETER.match(text, pos)
            if parameter is None:
                break
            key = parameter[1].strip()
            end = _END_PARAMETER.search(text, parameter.end())
            if end is None:
                return Malformed(f"the value of {key!r} has no </parameter>", parameter.end())
            arguments[key] = _typed(_unwrap(text[parameter.end() : end.start()]), types.get(key))
            pos = end.end()
        if text.startswith(END_FUNCTION, pos):
            return ToolCall(name=name, arguments=arguments), pos + len(END_FUNCTION)
        if pos == len(text) or text.startswith(CLOSE, pos):
            return ToolCall(name=name, arguments=arguments), pos
        return Malformed(f"unexpected text {text[pos : pos + 40]!r} where a parameter or </function> must stand", pos)

    def _malformed(self, text: str, start: int, problem: Malformed, turn: TurnBuilder) -> int:
        close = text.find(CLOSE, problem.pos)
        end = close + len(CLOSE) if close >= 0 else len(text)
        turn.error(f"The tool call cannot be read: {problem.reason}. {_FORM}.", text[start:end])
        return end

    def render(self, turn: AssistantTurn) -> str:
        return join(turn.content, *(_render_call(call) for call in turn.tool_calls))


def _render_call(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{OPEN}\n<function={call.name}>\n{parameters}{END_FUNCTION}\n{CLOSE}"


def _unwrap(value: str) -> str:
    """The value without the one newline that the format puts on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _parameter_schemas(name: str, tools: Tools | None) -> Mapping[str, Any]:
    for tool in tools or ():
        function = tool["function"]
        if function["name"] == name:
            parameters = function.get("parameters") or {}
            return parameters.get("properties") or {}
    return {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    kinds = schema.get("type")
    found.update([kinds] if isinstance(kinds, str) else kinds or ())
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            found |= _types(option)
    return found


def _typed(value: str, schema: Any) -> Any:
    """The value as its schema wants it; the text itself where it does not fit (validation tells the model)."""
    types = _types(schema)
    word = value.strip()
    if word == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return value
    if types & {"boolean"} and word.lower() in ("true", "false"):
        return word.lower() == "true"
    found = decode(word, 0)
    if isinstance(found, Malformed) or found[1] != len(word):
        return value
    return found[0]
