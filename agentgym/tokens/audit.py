"""What a chat template does and does not hold, found by probing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.errors import ConfigError
from agentgym.tokens.renderer import PROBE, Renderer
from agentgym.types import Message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Zürich 東京 <b>",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
USER: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": "answer"}
THOUGHT: Message = {"role": "assistant", "content": f"<think>\n{PROBE}\n</think>\n\nanswer"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": {"x": "ü<"}}}
    ],
}
RESULT: Message = {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": f"{PROBE} ü <"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One property of a chat template."""

    name: str
    ok: bool
    """False: it costs something (a segment per turn, a tool the model never sees); ``detail`` says what."""
    detail: str

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'NOTE':4} {self.name}: {self.detail}"


def audit(renderer: Renderer) -> list[Finding]:
    """All findings, in a fixed order."""
    probe = _Probe(renderer)
    return [
        probe.append_only("append_only_tool", CALL, RESULT, [TOOL]),
        probe.append_only("append_only_user", ANSWER, USER, None),
        probe.append_only("append_only_thinking", THOUGHT, USER, None),
        probe.separator(),
        probe.end_token(),
        probe.bos(),
        probe.default_system(),
        probe.opens_thinking(),
        probe.call_ids(),
        probe.tools_shown(),
        probe.characters(),
    ]


class _Probe:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        template = self.renderer.template
        return template.render(template.prepare(messages, tools), generation_prompt=prompt)

    def append_only(self, name: str, turn: Message, new: Message, tools: Sequence[Any] | None) -> Finding:
        def probe() -> Finding:
            end = self.renderer.stop_token_ids[:1]
            increment = self.renderer.extend([USER], turn, [new], tools, end)
            if increment.new_prompt is None:
                return Finding(name=name, ok=True, detail="history stays as it is")
            return Finding(name=name, ok=False, detail=f"starts a new segment: {increment.reason}")

        return _refusals(name, probe)

    def separator(self) -> Finding:
        text = self.renderer.closing
        end = self._end()
        after = text[text.find(end) + len(end) :] if end is not None else text
        return Finding(name="separator", ok=True, detail=f"{after!r} between turns" if after else "none between turns")

    def end_token(self) -> Finding:
        end = self._end()
        if end is None:
            detail = f"the template writes no end token; turns end with {self._names() or 'nothing at all'}"
            return Finding(name="end_token", ok=False, detail=detail)
        return Finding(name="end_token", ok=True, detail=f"{end!r}; generation stops at {self._names()}")

    def bos(self) -> Finding:
        bos = self.renderer.tokenizer.bos_token
        text = self.text([USER])
        if not bos or bos not in text:
            return Finding(name="bos", ok=True, detail="the template writes none")
        return Finding(name="bos", ok=bos + bos not in text, detail=f"the prompt holds {bos!r}")

    def default_system(self) -> Finding:
        text = self.text([USER])
        extra = text[: text.find(USER["content"])] if isinstance(USER["content"], str) else ""
        injected = "system" in extra
        detail = f"added where there is none: {extra!r}" if injected else "none is added"
        return Finding(name="default_system_prompt", ok=not injected, detail=detail)

    def opens_thinking(self) -> Finding:
        prefix = self.renderer.thinking_prefix
        detail = f"the prompt opens it with {prefix!r}" if prefix else "the prompt does not open it"
        return Finding(name="thinking", ok=True, detail=detail)

    def call_ids(self) -> Finding:
        def probe() -> Finding:
            call = CALL["tool_calls"][0]
            bare: Message = {**CALL, "tool_calls": [{"type": "function", "function": call["function"]}]}
            self.text([USER, bare, {"role": "tool", "content": PROBE}], [TOOL])
            return Finding(name="call_ids", ok=True, detail="ids and names may be missing")

        return _refusals("call_ids", probe)

    def tools_shown(self) -> Finding:
        def probe() -> Finding:
            text = self.text([USER, CALL, RESULT], [TOOL])
            parts = {
                "schemas": '"probe_tool"' in text.replace("'", '"'),
                "calls": "ü<" in text,
                "results": PROBE in text,
            }
            missing = [part for part, shown in parts.items() if not shown]
            detail = (
                f"the template leaves out: {', '.join(missing)}" if missing else "schemas, calls and results are shown"
            )
            return Finding(name="tools", ok=not missing, detail=detail)

        return _refusals("tools", probe)

    def characters(self) -> Finding:
        def probe() -> Finding:
            text = self.text([USER, CALL, RESULT], [TOOL])
            escaped = [form for form in ("\\u00fc", "\\u6771", "&lt;", "\\u003c") if form in text]
            detail = f"escaped on the way: {', '.join(escaped)}" if escaped else "pass as they are"
            return Finding(name="characters", ok=not escaped, detail=detail)

        return _refusals("characters", probe)

    def _end(self) -> str | None:
        found = [(self.renderer.closing.find(t), t) for t in self.renderer.stop_tokens if t in self.renderer.closing]
        return min(found)[1] if found else None

    def _names(self) -> str:
        return ", ".join(repr(token) for token in self.renderer.stop_tokens)


def _refusals(name: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except ConfigError as error:
        return Finding(name=name, ok=False, detail=f"the template raises: {error.__cause__}")
