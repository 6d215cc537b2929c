"""The sessions of a tool server: opened and released once, their calls run once, their leases watched.

Every session has a `Toolbox`, which is all there is of tool semantics. A call is a task of its own: a client that goes
away does not stop it, and one that asks again with the same request id waits for the same task. A session without
calls or renewals is released when its lease ends; while a call runs the lease does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentgym.errors import AgentGymError, ConfigError, boundary
from agentgym.resources import Resources
from agentgym.sandbox import LazySandbox, SandboxConfig
from agentgym.tool import BaseTool, ToolContext
from agentgym.tool_results import ToolResult
from agentgym.toolbox import Toolbox, ToolLimits, select_tools
from agentgym.tools.server.protocol import CallRequest, CallResult, Fault, OpenSession, fault_of
from agentgym.tools.serving import MAX_REQUEST_BYTES, Refusal
from agentgym.types import ToolCall, ToolResponse

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Ids of released sessions that are remembered, so that a late request cannot open one again."""


class ServerLimits(BaseModel):
    """Limits of a tool server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sessions: int = Field(default=1024, ge=1)
    """Sessions at the same time; further ones are refused until there is room."""
    lease: float = Field(default=300.0, gt=0)
    """Seconds without a call or renewal after which a session is released, unless it asked for less or more."""
    max_lease: float = Field(default=3600.0, gt=0)
    max_request_bytes: int = Field(default=MAX_REQUEST_BYTES, ge=1024)
    max_response_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Longer text of a tool is cut in its middle; an answer that is longer for other reasons becomes an error."""
    close_timeout: float = Field(default=30.0, gt=0)
    """Seconds for the release of one session."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call ended with: a result for the model, or a fault. Kept for clients that ask again."""

    status: int
    value: CallResult | Fault


@dataclass(slots=True)
class Call:
    """One request id of a session."""

    digest: bytes
    """Of the request, to tell a retry from a wrong use of the same id."""
    task: asyncio.Task[Answer] | None
    """None: stopped by the client, or finished so long ago that the result is gone."""
    stopped: bool = False


@dataclass(slots=True)
class ServerStats:
    """Counters since the start."""

    opened: int = 0
    closed: int = 0
    expired: int = 0
    refused: int = 0
    deduplicated: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By tool and outcome: ok, error (the model was told), stopped, or the type of the fault."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time in calls, by tool."""


class ServerSession:
    """One session; made by `SessionTable.open`."""

    def __init__(self, id: str, table: SessionTable, request: OpenSession) -> None:
        self.id = id
        self.request = request
        self.lease = min(request.lease or table.limits.lease, table.limits.max_lease)
        self._table = table
        self._resources = Resources()
        self._resources.owner = id
        sandbox = None
        if table.sandbox is not None:
            sandbox = LazySandbox(table.sandbox)
            self._resources.push("sandbox", sandbox.close)
        self.toolbox = Toolbox(
            table.tools,
            selection=request.tool_selection,
            tools_kwargs=request.tools_kwargs,
            limits=table.tool_limits,
            context=ToolContext(session_id=id, sandbox=sandbox),
        )
        self._resources.push("tools", self.toolbox.release)
        self._calls: OrderedDict[str, Call] = OrderedDict()
        self._running = 0
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self.lease
        self._timer = self._loop.call_at(self._deadline, self._check_lease)

    def renew(self) -> None:
        """Let the lease begin anew."""
        self._deadline = self._loop.time() + self.lease

    async def call(self, request: CallRequest) -> Answer:
        """Run a call, or wait for the one with the same request id. Raises `Refusal`."""
        self.renew()
        digest = _digest(request)
        known = self._calls.get(request.request_id)
        if known is not None:
            self._table.stats.deduplicated += 1
            task = self._known_task(known, digest, request.request_id)
        else:
            if request.create_kwargs and request.name in {tool.name for tool in self.toolbox.tools}:
                try:
                    self.toolbox.configure(request.name, request.create_kwargs)
                except ConfigError as error:
                    raise Refusal(400, "ConfigError", str(error)) from error
            task = asyncio.create_task(self._run(request), name=f"call {request.request_id} of session {self.id}")
            self._calls[request.request_id] = Call(digest, task)
            self._forget_old_results()
        await asyncio.wait({task})
        if task.cancelled():
            raise Refusal(409, "stopped", f"call {request.request_id!r} was stopped")
        return task.result()

    async def stop(self, request_id: str) -> None:
        """Stop a call, and refuse it if it arrives later."""
        call = self._calls.setdefault(request_id, Call(b"", None, stopped=True))
        if call.task is not None and not call.task.done():
            call.stopped = True
            call.task.cancel()
            await asyncio.wait({call.task})

    async def rewards(self) -> dict[str, float]:
        """See `Toolbox.rewards`."""
        self.renew()
        self._running += 1
        try:
            return await self.toolbox.rewards()
        finally:
            self._running -= 1
            self.renew()

    async def release(self) -> None:
        """Stop all calls and release everything; called once."""
        self._timer.cancel()
        tasks = [call.task for call in self._calls.values() if call.task is not None and not call.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._resources.release(self._table.limits.close_timeout)

    def _known_task(self, known: Call, digest: bytes, request_id: str) -> asyncio.Task[Answer]:
        if known.stopped:
            raise Refusal(409, "stopped", f"call {request_id!r} was stopped")
        if known.digest != digest:
            raise Refusal(409, "conflict", f"request id {request_id!r} belongs to another call; use a new id")
        if known.task is None:
            raise Refusal(410, "gone", f"call {request_id!r} was answered, but its result is not kept any more")
        return known.task

    async def _run(self, request: CallRequest) -> Answer:
        limit = self.toolbox.limits.max_parallel_calls
        name, stats, start = request.name, self._table.stats, self._loop.time()
        outcome = "stopped"
        self._running += 1
        try:
            if self._running > limit:
                text = f"Error: more than {limit} calls at the same time; this one did not run. Repeat it."
                answer = Answer(200, CallResult(request_id=request.request_id, text=text, error=True))
            else:
                answer = await self._execute(request)
            outcome = _outcome(answer)
        finally:
            self._running -= 1
            self.renew()
            label = name if name in self._table.names else "unknown"
            stats.calls[label, outcome] += 1
            stats.seconds[label] += self._loop.time() - start
        return answer

    async def _execute(self, request: CallRequest) -> Answer:
        arguments: Any = request.arguments
        call = ToolCall(name=request.name, arguments=arguments, id=request.request_id)
        try:
            [result] = await self.toolbox.execute([call])
            with boundary(f"result of tool {request.name!r}"):
                return Answer(200, self._message(result))
        except AgentGymError as error:
            status, fault = fault_of(error)
            logger.error("session %s: call %s of %r: %s", self.id, request.request_id, request.name, error)
            return Answer(status, fault)

    def _message(self, result: ToolResult) -> CallResult:
        message = CallResult.of(result)
        limit = self._table.limits.max_response_bytes
        size = len(message.model_copy(update={"text": ""}).model_dump_json())  # the text was cut by the toolbox
        if size <= limit:
            return message
        text = f"Error: the answer has {size:,} bytes beside its text, at most {limit:,} are sent. Ask for less."
        return CallResult.of(ToolResult(call=result.call, response=ToolResponse(text=text), metrics={}, error=True))

    def _forget_old_results(self) -> None:
        """A client asks again while its turn is under way: results of the turns before are of no use."""
        keep = 2 * self.toolbox.limits.max_parallel_calls
        finished = [call for call in self._calls.values() if call.task is not None and call.task.done()]
        for call in finished[: max(0, len(finished) - keep)]:
            call.task = None

    def _check_lease(self) -> None:
        if self._running:
            self.renew()
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check_lease)
        else:
            self._table.expire(self)


class SessionTable:
    """All sessions of a server.

    Args:
        tools: what every session may use.
        tool_limits: of calls.
        limits: of the server.
        sandbox: settings of the sandbox that each session gets at its first use; None: none.

    Raises:
        ConfigError: two tools of one name, or a tool that cannot be called.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        *,
        tool_limits: ToolLimits | None = None,
        limits: ServerLimits | None = None,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        self.tools = tuple(select_tools(tools, None, where="tool server"))
        self.names = frozenset(tool.name for tool in self.tools)
        self.limits = limits or ServerLimits()
        longest = self.limits.max_response_bytes // 4  # of four bytes each, without a tokenizer
        tool_limits = tool_limits or ToolLimits()
        if tool_limits.max_tool_response_tokens is None or tool_limits.max_tool_response_tokens > longest:
            tool_limits = tool_limits.model_copy(update={"max_tool_response_tokens": longest})
        self.tool_limits = tool_limits
        self.sandbox = sandbox
        self.stats = ServerStats()
        self._sessions: dict[str, ServerSession] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def live(self) -> int:
        """Sessions that are open or being released."""
        return self.stats.opened - self.stats.closed

    def open(self, key: str | None, request: OpenSession) -> tuple[ServerSession, bool]:
        """The session of a key, and whether it is new. Raises `Refusal`."""
        if self._closed:
            raise Refusal(503, "closing", "the server is being stopped")
        if key is not None and (known := self._sessions.get(key)) is not None:
            if known.request != request:
                raise Refusal(409, "conflict", f"{key!r} belongs to a session with other settings; use a new key")
            known.renew()
            self.stats.deduplicated += 1
            return known, False
        if key in self._released:
            raise Refusal(410, "gone", f"session {key!r} was released; use a new key")
        if self.live >= self.limits.max_sessions:
            self.stats.refused += 1
            raise Refusal(429, "full", f"{self.live} sessions are open, the server's limit; try later", retry_after=1)
        try:
            session = ServerSession(key or uuid.uuid4().hex, self, request)
        except ConfigError as error:
            raise Refusal(400, "ConfigError", str(error)) from error
        self._sessions[session.id] = session
        self.stats.opened += 1
        return session, True

    def find(self, id: str) -> ServerSession:
        """A session by its id. Raises `Refusal`."""
        session = self._sessions.get(id)
        if session is None:
            why = "it was released, or its lease ended" if id in self._released else "open one with POST /sessions"
            raise Refusal(404, "unknown_session", f"no session {id!r}: {why}")
        return session

    async def close(self, id: str) -> None:
        """Release a session; one that is not there is only remembered, so that it cannot be opened later."""
        if id in self._sessions:
            self._start_release(self._sessions[id])
        else:
            self._remember(id)
        if id in self._closing:
            await asyncio.wait({self._closing[id]})

    def expire(self, session: ServerSession) -> None:
        """Release a session whose lease ended."""
        logger.warning("session %s: no call for %g s, released", session.id, session.lease)
        self.stats.expired += 1
        self._start_release(session)

    async def aclose(self) -> None:
        """Release all sessions at the same time and refuse new ones."""
        self._closed = True
        for session in list(self._sessions.values()):
            self._start_release(session)
        while self._closing:
            await asyncio.wait(self._closing.values())

    def _start_release(self, session: ServerSession) -> None:
        """From here on the session is not found any more; its release is a task that nobody interrupts."""

        async def release() -> None:
            try:
                await session.release()
            finally:
                del self._closing[session.id]
                self.stats.closed += 1

        del self._sessions[session.id]
        self._remember(session.id)
        self._closing[session.id] = asyncio.create_task(release(), name=f"release of session {session.id}")

    def _remember(self, id: str) -> None:
        self._released[id] = None
        if len(self._released) > MAX_REMEMBERED:
            self._released.popitem(last=False)


def _outcome(answer: Answer) -> str:
    match answer.value:
        case CallResult(error=error):
            return "error" if error else "ok"
        case Fault(type=kind):
            return kind


def _digest(request: CallRequest) -> bytes:
    content: Mapping[str, Any] = request.model_dump()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode(errors="replace")).digest()
