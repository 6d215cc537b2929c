"""From what a tool returns to what the model reads: text forms, rewards and metrics, and the limit on length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, Protocol

from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentgym.types import Message, Part, ToolCall, ToolResponse

CutSide = Literal["left", "right", "middle"]
"""The side of a long text that is cut away."""


class TokenCutter(Protocol):
    """Cuts text to a number of tokens; the renderer of a model has the exact one."""

    def cut(self, text: str, limit: int, side: CutSide) -> str:
        """``text`` if it has at most ``limit`` tokens; else what fits of it beside a marker that says how much is gone.

        The result, marker included, has at most ``limit`` tokens. ``side`` is the part that is dropped: ``left`` keeps
        the end, ``right`` the beginning, ``middle`` both.
        """
        ...


class ByteCutter:
    """The cutter without a tokenizer: four UTF-8 bytes count as one token."""

    BYTES_PER_TOKEN = 4
    MARKERS = ("[... {} tokens cut ...]", "[{} cut]", "")
    """The first for which there is room."""

    def cut(self, text: str, limit: int, side: CutSide) -> str:
        """See `TokenCutter`; never cuts inside of a character."""
        data = text.encode()
        size = limit * self.BYTES_PER_TOKEN
        if len(data) <= size:
            return text
        marker = next(marker for marker in self.MARKERS if len(marker.format(len(data))) < size)
        keep = size - len(marker.format(len(data)))
        begin = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
        head = data[:begin].decode(errors="ignore")
        tail = data[len(data) - (keep - begin) :].decode(errors="ignore")
        dropped = len(data) - len(head.encode()) - len(tail.encode())
        return head + marker.format(-(-dropped // self.BYTES_PER_TOKEN)) + tail


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer to one call; every call has exactly one."""

    call: ToolCall
    response: ToolResponse
    reward: float | None = None
    """What the tool gave for this call; None: nothing."""
    metrics: Mapping[str, Any]
    error: bool = False
    """The call failed in a way that the model was told: unknown tool, bad arguments, time limit, `ToolError`."""

    def message(self) -> Message:
        """The message that answers the call: text, or parts if there are images or videos."""
        response = self.response
        content: str | list[Part] = response.text or ""
        if response.image or response.video:
            parts: list[Part] = [{"type": "text", "text": response.text}] if response.text else []
            parts += [{"type": "image", "image": image} for image in response.image]
            parts += [{"type": "video", "video": video} for video in response.video]
            content = parts
        return {"role": "tool", "name": self.call.name, "tool_call_id": self.call.id, "content": content}


def read_result(value: Any, tool: str) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    """Response, reward and metrics of what a tool returned.

    A tuple is ``(response, reward)`` or ``(response, reward, metrics)``; anything else is the response alone, see
    `as_response`.

    Raises:
        TypeError: another form; a fault of the tool's code, so it names the tool.
    """
    if not isinstance(value, tuple):
        return as_response(value, tool), None, {}
    if len(value) not in (2, 3):
        raise TypeError(
            f"tool {tool!r} returned a tuple of {len(value)}; expected (response, reward) or "
            f"(response, reward, metrics). Return a list for plain data."
        )
    response, reward, metrics = value if len(value) == 3 else (*value, None)
    if reward is not None and not isinstance(reward, Real):
        raise TypeError(f"tool {tool!r} returned the reward {reward!r}; expected a number or None")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"tool {tool!r} returned the metrics {metrics!r}; expected a dict")
    return as_response(response, tool), None if reward is None else float(reward), dict(metrics or {})


def as_response(value: Any, tool: str) -> ToolResponse:
    """What the model reads of a returned value.

    =============================  =====================================================
    ``str``                        itself (lone surrogates become ``?``)
    ``None``                       the empty text
    ``bytes``                      decoded as UTF-8, undecodable bytes become U+FFFD
    ``ToolResponse``               itself; ``text=None`` is the empty text
    ``bool, int, float``           as JSON: ``true``, ``3``, ``3.0``
    ``dict``, ``list``             JSON in one line, non-ASCII characters kept; values inside may also be pydantic
                                   models, dataclasses, dates, enums, sets and numpy arrays
    pydantic model, dataclass,     the JSON of their fields or items
    numpy scalar or array
    =============================  =====================================================

    Raises:
        TypeError: a value without a JSON form.
    """
    match value:
        case str():
            return ToolResponse(text=_clean(value))
        case None:
            return ToolResponse(text="")
        case bytes() | bytearray() | memoryview():
            return ToolResponse(text=bytes(value).decode(errors="replace"))
        case ToolResponse(text=text):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"tool {tool!r} returned a ToolResponse with the text {text!r}; expected a str or None")
            clean = _clean(text or "")
            return value if clean is text else replace(value, text=clean)
    try:
        return ToolResponse(text=_clean(to_json(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"tool {tool!r} returned a {type(value).__name__} that has no JSON form ({error}); "
            f"expected str, dict, list, number, bool, bytes, None or ToolResponse"
        ) from error


def to_json(value: Any) -> str:
    """JSON in one line, non-ASCII characters kept; see `as_response`. Raises TypeError or ValueError."""
    return _ENCODER.encode(value)


def join_responses(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    """Both, text joined by a newline where both have some."""
    text = "\n".join(part for part in (first.text, second.text) if part)
    return ToolResponse(text=text, image=[*first.image, *second.image], video=[*first.video, *second.video])


def _clean(text: str) -> str:
    """``text`` without lone surrogates, which no tokenizer takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _jsonable(value: Any) -> Any:
    """The JSON form of what json itself does not know; arrays and scalars of numpy and torch have ``tolist``."""
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from error


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_jsonable)
