"""The messages between a tool server and its clients; the source of the server's OpenAPI description.

==========================================  ===========================================================================
``GET /tools``                              `ToolListing`
``POST /sessions``                          `OpenSession` -> `SessionInfo`. With the header ``Idempotency-Key``, which
                                            becomes the session's id, sending it again gives the same session.
``POST /sessions/{id}/calls``               `CallRequest` -> `CallResult`. A request id runs once: sending it again
                                            gives the same result, also while the first call is still running.
``DELETE /sessions/{id}/calls/{request}``   stops the call
``POST /sessions/{id}/renew``               renews the lease, as every call does
``GET /sessions/{id}/rewards``              `Rewards`, asked once at the end
``DELETE /sessions/{id}``                   releases the session; again: nothing
==========================================  ===========================================================================

What goes wrong is ``{"error": {"type": ..., "message": ...}}`` (`Fault`) with a status of 400 or above. What is wrong
with a *call* (an unknown tool, wrong arguments, a `ToolError`, the time limit) is no fault but a result for the model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from agentgym.errors import AgentGymError, ConfigError, EnvError, InfraError, SessionClosed
from agentgym.tool_results import ToolResult, to_json
from agentgym.types import ToolResponse

KEY_HEADER = "Idempotency-Key"
KEY_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"

Key = Annotated[str, StringConstraints(pattern=KEY_PATTERN)]

_BASE64 = "$base64"


class Message(BaseModel):
    """Base of all messages: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class ServedTool(Message):
    """One tool of a server."""

    tool_schema: dict[str, Any] = Field(description="OpenAI function schema")
    timeout: float | None = Field(description="Seconds that one call may take; null: the server's call_timeout")
    has_reward: bool = Field(description="Whether the tool gives a reward at the end of a session")


class ToolListing(Message):
    """What a server has, and its limits."""

    tools: list[ServedTool]
    call_timeout: float = Field(description="Seconds that one call may take")
    max_request_bytes: int


class OpenSession(Message):
    """Body of ``POST /sessions``."""

    tool_selection: list[str] | None = Field(default=None, description="Tools that may be called; null: all")
    tools_kwargs: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict, description='Per tool: {"create_kwargs": {...}}'
    )
    lease: float | None = Field(
        default=None, gt=0, description="Seconds after which an unused session is released; null: the server's default"
    )


class SessionInfo(Message):
    """A session."""

    session_id: str
    lease: float = Field(description="Seconds without a call or renewal after which the session is released")
    tools: list[dict[str, Any]] = Field(description="OpenAI function schemas of the tools that may be called")


class CallRequest(Message):
    """Body of ``POST /sessions/{id}/calls``."""

    request_id: Key = Field(description="Unique in the session; the same in every attempt to send this call")
    name: str = Field(max_length=256, description="Of the tool")
    arguments: dict[str, Any] | str | None = Field(default=None, description="An object, its JSON text, or null")
    create_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="With which the tool is created, if this is its first call in the session"
    )


class CallResult(Message):
    """The answer to a call."""

    request_id: str
    text: str | None = None
    image: list[Any] = Field(default_factory=list, description='Bytes are written as {"$base64": "..."}')
    video: list[Any] = Field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    error: bool = Field(default=False, description="The call failed; the text tells the model why")

    @classmethod
    def of(cls, result: ToolResult) -> CallResult:
        """The message for a result. Raises TypeError or ValueError for images and metrics without a JSON form."""
        response = result.response
        return cls(
            request_id=result.call.id,
            text=response.text,
            image=json.loads(to_json(_encode(response.image))),
            video=json.loads(to_json(_encode(response.video))),
            reward=result.reward,
            metrics=json.loads(to_json(dict(result.metrics))),
            error=result.error,
        )

    @property
    def response(self) -> ToolResponse:
        """What the tool answered."""
        return ToolResponse(text=self.text, image=_decode(self.image), video=_decode(self.video))


class Rewards(Message):
    """`BaseTool.calc_reward` of the tools that were created in a session."""

    rewards: dict[str, float]


class Fault(Message):
    """Why a request was refused or failed."""

    model_config = ConfigDict(extra="ignore")

    type: str
    message: str
    error_type: str = Field(default="", description="Class of the original exception, for a fault in a tool's code")
    traceback: str = ""


class FaultAnswer(Message):
    """The body of every answer with a status of 400 or above."""

    error: Fault


def fault_of(error: AgentGymError) -> tuple[int, Fault]:
    """Status and fault for an error of the tools."""
    fault = Fault(type=type(error).__name__, message=str(error))
    match error:
        case EnvError():
            details = {"type": "EnvError", "error_type": error.error_type, "traceback": error.traceback_text}
            return 500, fault.model_copy(update=details)
        case InfraError():
            return 502, fault.model_copy(update={"type": "InfraError"})
        case ConfigError():
            return 400, fault.model_copy(update={"type": "ConfigError"})
        case SessionClosed():
            return 410, fault
    return 500, fault


def _encode(items: Sequence[Any]) -> list[Any]:
    return [{_BASE64: base64.b64encode(item).decode()} if isinstance(item, bytes) else item for item in items]


def _decode(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        base64.b64decode(item[_BASE64]) if isinstance(item, Mapping) and item.keys() == {_BASE64} else item
        for item in items
    )
