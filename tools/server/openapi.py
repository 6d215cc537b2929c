"""The OpenAPI description of the tool server, made of its messages."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from agentgym.tools.server.protocol import (
    KEY_HEADER,
    KEY_PATTERN,
    CallRequest,
    CallResult,
    FaultAnswer,
    OpenSession,
    Rewards,
    SessionInfo,
    ToolListing,
)

_MODELS: tuple[type[BaseModel], ...] = (
    CallRequest,
    CallResult,
    FaultAnswer,
    OpenSession,
    Rewards,
    SessionInfo,
    ToolListing,
)
_KEY = {"type": "string", "pattern": KEY_PATTERN}
_SESSION = {"name": "id", "in": "path", "required": True, "description": "Of the session", "schema": _KEY}
_REQUEST = {"name": "request", "in": "path", "required": True, "description": "Id of the call", "schema": _KEY}
_IDEMPOTENCY = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "Becomes the session's id; sending it again gives the same session",
    "schema": _KEY,
}
_REASONS = {
    400: "The request is malformed; the message says where",
    401: "The bearer token is missing or wrong",
    404: "No such session: it was released, or its lease ended",
    409: "The id belongs to another request, or the call was stopped",
    410: "Released; its id cannot be used again",
    413: "The request is too long",
    429: "The limit of sessions is reached; try later",
    500: "A fault in the code of a tool",
    502: "A tool lost a connection",
}


def describe() -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agentgym tool server",
            "version": version("agentgym"),
            "description": "Tools that keep their state for a session. Every session has tools of its own.",
        },
        "paths": _paths(),
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _paths() -> dict[str, Any]:
    call = "/sessions/{id}/calls"
    return {
        "/tools": {"get": _operation("The tools and limits of the server", {200: ToolListing}, [401])},
        "/sessions": {
            "post": _operation(
                "Open a session",
                {201: SessionInfo, 200: SessionInfo},
                [400, 401, 409, 410, 413, 429],
                body=OpenSession,
                parameters=[_IDEMPOTENCY],
            )
        },
        call: {
            "post": _operation(
                "Run a call; a request id runs once",
                {200: CallResult},
                [400, 401, 404, 409, 410, 413, 500, 502],
                body=CallRequest,
                parameters=[_SESSION],
            )
        },
        f"{call}/{{request}}": {
            "delete": _operation("Stop a call", {204: None}, [401, 404], parameters=[_SESSION, _REQUEST])
        },
        "/sessions/{id}/renew": {
            "post": _operation("Renew the lease", {200: SessionInfo}, [401, 404], parameters=[_SESSION])
        },
        "/sessions/{id}/rewards": {
            "get": _operation(
                "Rewards of the session's tools", {200: Rewards}, [401, 404, 500, 502], parameters=[_SESSION]
            )
        },
        "/sessions/{id}": {
            "delete": _operation("Release a session; again: nothing", {204: None}, [401], parameters=[_SESSION])
        },
        "/healthz": {"get": {**_operation("Whether the server answers", {200: None}, []), "security": []}},
        "/metrics": {"get": _operation("Counters in the text format of Prometheus", {200: None}, [401])},
        "/openapi.json": {"get": {**_operation("This description", {200: None}, []), "security": []}},
    }


def _operation(
    summary: str,
    results: dict[int, type[BaseModel] | None],
    refusals: list[int],
    *,
    body: type[BaseModel] | None = None,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    responses = {str(status): {"description": summary, **_content(model)} for status, model in results.items()}
    responses |= {str(status): {"description": _REASONS[status], **_content(FaultAnswer)} for status in refusals}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": False, **_content(body)}
    return operation


def _content(model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return {}
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}}
