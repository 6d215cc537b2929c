"""Tools of a tool server that look like local ones.

Every session of agentgym that calls one of them has a session on the server, shared by all tools of that server: opened
at the first call, kept by renewals while the model thinks, released with the session. A request whose connection is
lost is sent again under the same id, so that it runs once; a server that stays away is an `InfraError`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from agentgym.errors import AgentGymError, ConfigError, EnvError, InfraError, ToolError
from agentgym.tool import BaseTool, ToolContext
from agentgym.tools.server.protocol import (
    KEY_HEADER,
    CallRequest,
    CallResult,
    FaultAnswer,
    OpenSession,
    Rewards,
    ServedTool,
    SessionInfo,
    ToolListing,
)
from agentgym.tools.shared import PerSession
from agentgym.types import ToolResponse

M = TypeVar("M", bound=BaseModel)

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Of a request whose connection is lost."""
BACKOFF = 0.1
"""Seconds before the second attempt, doubled for each further one."""
CONNECT_TIMEOUT = 5.0
MARGIN = 10.0
"""Seconds beyond a call's own limit after which the server counts as lost."""
OPEN_TIMEOUT = 30.0
"""Seconds for opening a session, waiting for a place on a full server included."""
CLOSE_TIMEOUT = 4.0
LEASE = 120.0
"""Seconds after which the server releases sessions of a client that ended without releasing them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is: ``http://HOST:PORT`` or ``unix:PATH``, and its token."""

    address: str
    token: str

    def client(self) -> aiohttp.ClientSession:
        """A connection of its own; the caller closes it."""
        base, connector = self.address, None
        if self.address.startswith("unix:"):
            base, connector = "http://tools", aiohttp.UnixConnector(self.address.removeprefix("unix:"))
        return aiohttp.ClientSession(
            base_url=base,
            connector=connector,
            headers={"Authorization": f"Bearer {self.token}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )


class Locator(Protocol):
    """Knows where the server is; starts it, if it is one that has to be started."""

    @property
    def name(self) -> str:
        """For messages."""

    async def locate(self) -> Endpoint:
        """The endpoint of a running server. Raises `InfraError` if it could not be started."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A server that somebody else started."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        """The address."""
        return self.endpoint.address

    async def locate(self) -> Endpoint:
        """The endpoint, unchecked."""
        return self.endpoint


class Requester:
    """Sends requests over one connection and reads the answers.

    Args:
        endpoint: the server.
        name: of the server, for messages.
    """

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._client = endpoint.client()
        self._name = name

    async def aclose(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def send(
        self,
        method: str,
        path: str,
        model: type[M],
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float,
        attempts: int = ATTEMPTS,
    ) -> M:
        """The answer, after further attempts if the connection is lost or the server is full.

        Raises:
            InfraError: the server is lost, or lost something itself, or does not know the session any more.
            EnvError: a fault in the code of a tool, with its traceback.
            ToolError: the request is too long.
            ConfigError: the token or a name is wrong.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        lost = full = 0
        while True:
            wait = 0.0
            limit = aiohttp.ClientTimeout(total=deadline - loop.time(), connect=CONNECT_TIMEOUT)
            try:
                headers = {"Content-Type": "application/json", **(headers or {})}
                async with self._client.request(method, path, data=body, headers=headers, timeout=limit) as response:
                    data = await response.read()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                lost += 1
                wait = BACKOFF * 2 ** (lost - 1)
                reason = f"{type(error).__name__}: {error}"
                if lost == attempts:
                    raise InfraError(f"tool server {self._name} is lost: {reason} ({lost} attempts)") from error
            except TimeoutError as error:
                raise InfraError(f"tool server {self._name} did not answer {method} {path} in {timeout:g} s") from error
            else:
                if response.status != 429 or attempts == 1:
                    return self._read(response.status, data, model)
                full += 1
                wait = min(BACKOFF * 2 ** (full - 1), 2.0)
                reason = "it has no place for another session"
            if loop.time() + wait > deadline:
                raise InfraError(f"tool server {self._name}: {reason}, for {timeout:g} s")
            await asyncio.sleep(wait)

    def _read(self, status: int, data: bytes, model: type[M]) -> M:
        try:
            if status < 400:
                return model.model_validate_json(data or b"{}")
            fault = FaultAnswer.model_validate_json(data).error
        except ValidationError as error:
            raise EnvError(
                f"{self._name} answered HTTP {status} with {data[:200]!r}; is it a tool server of agentgym?"
            ) from error
        where = f"tool server {self._name}: {fault.message}"
        match status:
            case 413:
                raise ToolError(f"Error: {fault.message}. Send less.")
            case 404 | 409 | 410 | 502 | 503 | 429:
                raise InfraError(where)
            case 401 | 400 if fault.type in ("unauthorized", "ConfigError"):
                raise ConfigError(where)
        raise EnvError(where, error_type=fault.error_type or fault.type, traceback_text=fault.traceback)


class Empty(BaseModel):
    """An answer without content, or one that is not read."""


class RemoteServer:
    """One tool server, with the sessions that this process has on it.

    Args:
        locator: where it is.
    """

    def __init__(self, locator: Locator) -> None:
        self.locator = locator
        self.sessions = PerSession(lambda context: RemoteSession(self))
        self.listing: ToolListing | None = None

    async def list_tools(self) -> ToolListing:
        """Ask for the tools. Raises `ConfigError` if there is no tool server, or the token is wrong."""
        requester = Requester(await self.locator.locate(), self.locator.name)
        try:
            self.listing = await requester.send("GET", "/tools", ToolListing, timeout=CONNECT_TIMEOUT)
        except (InfraError, EnvError) as error:
            raise ConfigError(f"the tools of {self.locator.name} cannot be listed: {error}") from error
        finally:
            await requester.aclose()
        return self.listing

    def time_limit(self, name: str) -> float:
        """Seconds after which a call must have been answered."""
        assert self.listing is not None
        own = next((tool.timeout for tool in self.listing.tools if tool.tool_schema["function"]["name"] == name), None)
        return (own or self.listing.call_timeout) + MARGIN


class RemoteSession:
    """The session on a server that belongs to one session here.

    Args:
        server: the server.
    """

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._id = uuid.uuid4().hex
        self._requester: Requester | None = None
        self._renewals: asyncio.Task[None] | None = None
        self._stops: set[asyncio.Task[None]] = set()
        self._rewards: asyncio.Task[Rewards] | None = None
        self._lost = False

    async def open(self) -> None:
        """Open it on the server. The id is ours: it can be released even if the answer never arrives."""
        self._requester = Requester(await self._server.locator.locate(), self._server.locator.name)
        info = await self._send(
            "POST", "", SessionInfo, OpenSession(lease=LEASE), headers={KEY_HEADER: self._id}, timeout=OPEN_TIMEOUT
        )
        self._renewals = asyncio.create_task(self._renew(info.lease), name=f"renewals of session {self._id}")

    async def call(self, name: str, arguments: dict[str, Any], create_kwargs: Mapping[str, Any]) -> CallResult:
        """Run one call; stops it on the server if the caller is cancelled. Raises as `Requester.send`."""
        request_id = uuid.uuid4().hex
        request = CallRequest(request_id=request_id, name=name, arguments=arguments, create_kwargs=dict(create_kwargs))
        try:
            return await self._send(
                "POST", f"/{self._id}/calls", CallResult, request, timeout=self._server.time_limit(name)
            )
        except asyncio.CancelledError:
            stop = asyncio.create_task(self._stop(request_id), name=f"stop of call {request_id}")
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)
            raise

    async def rewards(self) -> dict[str, float]:
        """The rewards of the session, asked once for all its tools."""
        if self._rewards is None:
            timeout = OPEN_TIMEOUT
            self._rewards = asyncio.create_task(
                self._send("GET", f"/{self._id}/rewards", Rewards, timeout=timeout), name=f"rewards of {self._id}"
            )
        return (await asyncio.shield(self._rewards)).rewards

    async def close(self) -> None:
        """Release it on the server. One that is gone has released it itself, or its lease does."""
        if self._requester is None:
            return
        tasks: list[asyncio.Task[Any]] = [task for task in (self._renewals, self._rewards) if task is not None]
        tasks += self._stops  # releasing the session stops its calls
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # told to whoever asked
        try:
            await self._send("DELETE", f"/{self._id}", Empty, timeout=CLOSE_TIMEOUT, attempts=1 if self._lost else 2)
        except AgentGymError as error:
            logger.warning("session %s was not released: %s", self._id, error)
        finally:
            await self._requester.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        model: type[M],
        body: BaseModel | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float,
        attempts: int = ATTEMPTS,
    ) -> M:
        assert self._requester is not None
        listing = self._server.listing
        try:
            data = b"" if body is None else json.dumps(body.model_dump(), ensure_ascii=False).encode(errors="replace")
        except (ValueError, RecursionError) as error:
            raise ToolError("Error: the arguments are nested too deeply.") from error
        if listing is not None and len(data) > listing.max_request_bytes:
            limit = listing.max_request_bytes
            raise ToolError(f"Error: the call has {len(data):,} bytes, at most {limit:,} are accepted. Send less.")
        try:
            return await self._requester.send(
                method, f"/sessions{path}", model, body=data, headers=headers, timeout=timeout, attempts=attempts
            )
        except InfraError:
            self._lost = True
            raise

    async def _stop(self, request_id: str) -> None:
        with suppress(AgentGymError):
            await self._send("DELETE", f"/{self._id}/calls/{request_id}", Empty, timeout=CONNECT_TIMEOUT, attempts=2)

    async def _renew(self, lease: float) -> None:
        while True:
            await asyncio.sleep(lease / 3)
            with suppress(AgentGymError):  # the next call says what is wrong
                await self._send("POST", f"/{self._id}/renew", SessionInfo, timeout=lease / 3, attempts=2)


@dataclass(frozen=True, slots=True)
class _Instance:
    """A tool in one session."""

    context: ToolContext
    session: RemoteSession
    create_kwargs: Mapping[str, Any]


class RemoteTool(BaseTool):
    """A tool of a tool server; made by `agentgym.tools.server.remote_tools`."""

    def __init__(self, server: RemoteServer, served: ServedTool) -> None:
        super().__init__({}, served.tool_schema)
        self.timeout = served.timeout
        self.has_reward = served.has_reward
        self._server = server
        self._instances: dict[str, _Instance] = {}

    def read_parameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as they are: the server checks them, with the tool's own rules."""
        return arguments

    async def create(
        self, instance_id: str | None = None, *, context: ToolContext | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Join the session on the server; the tool itself is created there, by its first call."""
        instance_id, response = await super().create(instance_id)
        context = context or ToolContext(session_id=instance_id)
        session = await self._server.sessions.join(context)
        self._instances[instance_id] = _Instance(context, session, kwargs)
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run the call on the server."""
        instance = self._instances[instance_id]
        result = await instance.session.call(self.name, parameters, instance.create_kwargs)
        if result.error:
            raise ToolError(result.text or "")
        return result.response, result.reward, result.metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the tool on the server says; 0.0 if its creation failed there."""
        return (await self._instances[instance_id].session.rewards()).get(self.name, 0.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Leave the session on the server; the last tool that leaves releases it."""
        await self._server.sessions.leave(self._instances.pop(instance_id).context)


def run_blocking(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine, from code that is not async; also where an event loop is running in this thread."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1, thread_name_prefix="agentgym-listing") as executor:
        return executor.submit(lambda: asyncio.run(make())).result()


def make_tools(server: RemoteServer, selection: Sequence[str] | None = None) -> list[BaseTool]:
    """The server's tools, listed now unless they are known.

    Raises:
        ConfigError: no server, a wrong token, or an unknown name in ``selection``.
    """
    from agentgym.toolbox import select_tools

    listing: ToolListing = server.listing or run_blocking(server.list_tools)
    tools = [RemoteTool(server, served) for served in listing.tools]
    return select_tools(tools, selection, where=f"tools of {server.locator.name}")
