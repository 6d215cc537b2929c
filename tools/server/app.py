"""The tool server as an aiohttp application; see `agentgym.tools.server.protocol` for its messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web
from pydantic import BaseModel

from agentgym.errors import AgentGymError
from agentgym.sandbox import SandboxConfig
from agentgym.tool import BaseTool
from agentgym.toolbox import ToolLimits
from agentgym.tools.server.openapi import describe
from agentgym.tools.server.protocol import (
    KEY_HEADER,
    KEY_PATTERN,
    CallRequest,
    OpenSession,
    Rewards,
    ServedTool,
    SessionInfo,
    ToolListing,
    fault_of,
)
from agentgym.tools.server.sessions import ServerLimits, ServerSession, SessionTable
from agentgym.tools.serving import Refusal, error_response, json_response, make_app, read_body

PUBLIC = ("/healthz", "/openapi.json")
"""Paths that need no token."""

_EXPECTED = "expected 1 to 128 characters of A-Z a-z 0-9 _ . -"


class ToolServer:
    """Tools with the semantics of a `Toolbox`, for clients elsewhere.

    Example:
        >>> server = ToolServer(load_tools("tools.yaml"), token="secret")
        >>> async with Service(server.app, Address(port=8000)):
        ...     ...

    Stopping the application releases all sessions.

    Args:
        tools: what is served.
        token: bearer token that every request needs.
        tool_limits: of calls.
        limits: of the server.
        sandbox: settings of the sandbox of each session; None: none.

    Raises:
        ConfigError: two tools of one name, or a tool that cannot be called.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        *,
        token: str,
        tool_limits: ToolLimits | None = None,
        limits: ServerLimits | None = None,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        self.sessions = SessionTable(tools, tool_limits=tool_limits, limits=limits, sandbox=sandbox)
        self.app = make_app(token=token, public=PUBLIC, limit=self.sessions.limits.max_request_bytes)
        self.app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/openapi.json", self._openapi),
                web.get("/metrics", self._metrics),
                web.get("/tools", self._tools),
                web.post("/sessions", self._open),
                web.post("/sessions/{id}/calls", self._call),
                web.delete("/sessions/{id}/calls/{request}", self._stop),
                web.post("/sessions/{id}/renew", self._renew),
                web.get("/sessions/{id}/rewards", self._rewards),
                web.delete("/sessions/{id}", self._close),
            ]
        )
        self.app.on_shutdown.append(self._shut_down)

    async def _healthz(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok", "tools": len(self.sessions.tools), "sessions": self.sessions.live})

    async def _openapi(self, _: web.Request) -> web.Response:
        return json_response(describe())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=_prometheus(self.sessions), content_type="text/plain", charset="utf-8")

    async def _tools(self, _: web.Request) -> web.Response:
        tools = [
            ServedTool(tool_schema=tool.tool_schema, timeout=tool.timeout, has_reward=_scores(tool))
            for tool in self.sessions.tools
        ]
        limits = self.sessions.limits
        return _answer(
            ToolListing(
                tools=tools,
                call_timeout=self.sessions.tool_limits.call_timeout,
                max_request_bytes=limits.max_request_bytes,
            )
        )

    async def _open(self, request: web.Request) -> web.Response:
        key = request.headers.get(KEY_HEADER)
        if key is not None and not re.fullmatch(KEY_PATTERN, key):
            raise Refusal(400, "bad_request", f"{KEY_HEADER} {key[:200]!r}: {_EXPECTED}")
        session, new = self.sessions.open(key, await read_body(request, OpenSession))
        return _answer(_info(session), status=201 if new else 200)

    async def _call(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await read_body(request, CallRequest)
        answer = await session.call(body)
        if answer.status == 200:
            return _answer(answer.value)
        return json_response({"error": answer.value.model_dump(mode="json")}, status=answer.status)

    async def _stop(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request"]
        if not re.fullmatch(KEY_PATTERN, request_id):
            raise Refusal(400, "bad_request", f"request id {request_id[:200]!r}: {_EXPECTED}")
        await self._session(request).stop(request_id)
        return web.Response(status=204)

    async def _renew(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.renew()
        return _answer(_info(session))

    async def _rewards(self, request: web.Request) -> web.Response:
        try:
            return _answer(Rewards(rewards=await self._session(request).rewards()))
        except AgentGymError as error:
            status, fault = fault_of(error)
            return error_response(status, fault.type, fault.message, **fault.model_dump(exclude={"type", "message"}))

    async def _close(self, request: web.Request) -> web.Response:
        await self.sessions.close(request.match_info["id"])
        return web.Response(status=204)

    def _session(self, request: web.Request) -> ServerSession:
        return self.sessions.find(request.match_info["id"])

    async def _shut_down(self, _: web.Application) -> None:
        await self.sessions.aclose()


def _scores(tool: BaseTool) -> bool:
    return tool.has_reward and tool.lifecycle == "session"


def _info(session: ServerSession) -> SessionInfo:
    return SessionInfo(session_id=session.id, lease=session.lease, tools=session.toolbox.schemas)


def _answer(message: BaseModel, *, status: int = 200) -> web.Response:
    return json_response(message.model_dump(mode="json"), status=status)


def _prometheus(table: SessionTable) -> str:
    """The counters in the text format of Prometheus."""
    stats = table.stats
    lines: list[str] = []

    def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.extend([f"# HELP agentgym_tools_{name} {text}", f"# TYPE agentgym_tools_{name} {kind}"])
        lines.extend(f"agentgym_tools_{name}{labels} {value:g}" for labels, value in samples)

    add("sessions_live", "gauge", "Sessions that are open or being released", ("", table.live))
    add("sessions_opened_total", "counter", "Sessions opened", ("", stats.opened))
    add("sessions_closed_total", "counter", "Sessions released", ("", stats.closed))
    add("sessions_expired_total", "counter", "Sessions released because their lease ended", ("", stats.expired))
    add("sessions_refused_total", "counter", "Sessions refused at the limit", ("", stats.refused))
    add("requests_deduplicated_total", "counter", "Requests that had been sent before", ("", stats.deduplicated))
    calls = [(f'{{tool="{tool}",outcome="{outcome}"}}', float(n)) for (tool, outcome), n in stats.calls.items()]
    add("calls_total", "counter", "Calls by tool and outcome", *calls)
    seconds = [(f'{{tool="{tool}"}}', value) for tool, value in stats.seconds.items()]
    add("call_seconds_total", "counter", "Time in calls by tool", *seconds)
    return "\n".join(lines) + "\n"
