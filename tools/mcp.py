"""Tools of an MCP server, over stdio or HTTP; needs the extra ``mcp`` (``pip install 'agentgym[mcp]'``).

Every session that calls one of them has a connection of its own (with stdio: a server process of its own), shared by
all tools of that server, opened at the first call and closed with the session. In a tool file::

    tools:
      - mcp: {command: [uvx, some-mcp-server], env: {KEY: value}}
        tools: [search]                       # some of its tools; without it all
      - mcp: http://127.0.0.1:9000/mcp
        token_env: MCP_TOKEN
        prefix: docs_                         # before the names, so that they do not collide
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentgym.config import ConfigModel, setting, validate
from agentgym.errors import AgentGymError, ConfigError, InfraError, ToolError, boundary
from agentgym.resources import outlast
from agentgym.tool import BaseTool, ToolContext
from agentgym.toolbox import select_tools
from agentgym.tools.server.client import run_blocking
from agentgym.tools.shared import PerSession
from agentgym.types import ToolResponse

if TYPE_CHECKING:
    import mcp

T = TypeVar("T")

CLOSE_TIMEOUT = 4.0
"""Seconds for the end of a connection; then it is cancelled, which ends a server process by force."""


class McpCommand(ConfigModel):
    """An MCP server that is started for each session and spoken to over its standard input and output."""

    command: list[str] = setting(..., "Program and arguments", min_length=1)
    env: dict[str, str] = setting({}, "Environment variables beside the usual few (HOME, PATH, ...)")
    cwd: Path | None = setting(None, "Working directory; in a tool file relative to it")


class McpEntry(ConfigModel):
    """``- mcp: ...`` in a tool file."""

    mcp: str | McpCommand = setting(..., "URL of a server, or {command: [...]} to start one per session")
    token_env: str | None = setting(None, "URL: environment variable with the bearer token")
    tools: list[str] | None = setting(None, "Names of the tools to use, as the server has them; null: all")
    prefix: str = setting("", "Put before the names of the tools")
    start_timeout: float = setting(30.0, "Seconds to start the server and connect", gt=0)


def mcp_tools(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    token_env: str | None = None,
    tools: Sequence[str] | None = None,
    prefix: str = "",
    start_timeout: float = 30.0,
) -> list[BaseTool]:
    """The tools of an MCP server, for a `ToolEnv` or a `Toolbox`.

    The server is asked for its tools here, blocking, once per process; with stdio it is started and ended for it.

    Example:
        >>> mcp_tools(["uvx", "some-mcp-server"])
        >>> mcp_tools("http://127.0.0.1:9000/mcp", tools=["search"])

    Args:
        server: URL (streamable HTTP), or program and arguments (stdio).
        env: program: environment variables.
        cwd: program: working directory.
        token_env: URL: environment variable with the bearer token.
        tools: names of those to use; None: all.
        prefix: put before the names.
        start_timeout: seconds to start the server and connect.

    Raises:
        ConfigError: the extra is missing, no server there, or an unknown tool.
    """
    source: Any = server
    if not isinstance(server, str):
        source = {"command": list(server), "env": dict(env or {}), "cwd": None if cwd is None else str(cwd)}
    entry = {
        "mcp": source,
        "token_env": token_env,
        "tools": None if tools is None else list(tools),
        "prefix": prefix,
        "start_timeout": start_timeout,
    }
    return _make_tools(validate(McpEntry, entry))


def tools_of_entry(entry: Mapping[str, Any], *, folder: Path, where: str) -> list[BaseTool]:
    """The tools of an entry of a tool file; see `McpEntry`. Raises `ConfigError`."""
    try:
        settings = validate(McpEntry, entry)
        if isinstance(settings.mcp, McpCommand):
            command = settings.mcp.model_copy(update={"cwd": (folder / (settings.mcp.cwd or ".")).resolve()})
            settings = settings.model_copy(update={"mcp": command})
        return _make_tools(settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _make_tools(settings: McpEntry) -> list[BaseTool]:
    server = McpServer(settings)
    listed = _list_once(settings.model_dump_json(exclude={"tools", "prefix"}))
    tools = [McpTool(server, tool, settings.prefix) for tool in listed]
    names = None if settings.tools is None else [settings.prefix + name for name in settings.tools]
    return select_tools(tools, names, where=f"tools of {server.name}")


@functools.cache
def _list_once(settings: str) -> Sequence[mcp.Tool]:
    """The tools of a server, asked once per process."""
    server = McpServer(validate(McpEntry, json.loads(settings)))
    tools: Sequence[mcp.Tool] = run_blocking(server.list_tools)
    return tools


class McpServer:
    """How to reach one MCP server, and the connections to it.

    Args:
        settings: where it is.

    Raises:
        ConfigError: the extra is missing.
    """

    def __init__(self, settings: McpEntry) -> None:
        try:
            import mcp  # noqa: F401 - asked before anything starts
        except ImportError as error:
            raise ConfigError("tools of MCP servers need the extra: pip install 'agentgym[mcp]'") from error
        self.settings = settings
        source = settings.mcp
        self.name = f"MCP server {source if isinstance(source, str) else ' '.join(source.command)!r}"
        self.sessions = PerSession(lambda context: McpConnection(self))

    async def list_tools(self) -> list[mcp.Tool]:
        """Ask for all tools. Raises `ConfigError` if there is no such server."""
        connection = McpConnection(self)
        try:
            await connection.open()
            found: list[mcp.Tool] = []
            cursor: str | None = None
            while True:
                page = await connection.use(functools.partial(_list_page, cursor=cursor))
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return found
        except AgentGymError as error:
            raise ConfigError(f"the tools of {self.name} cannot be listed: {error}") from error
        finally:
            await connection.close()

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[mcp.Client]:
        """A client, connected; to be left by the task that entered it."""
        import mcp

        source = self.settings.mcp
        async with contextlib.AsyncExitStack() as stack:
            server: Any
            if isinstance(source, McpCommand):
                program, *arguments = source.command
                env = {**source.env} or None
                server = mcp.StdioServerParameters(command=program, args=arguments, env=env, cwd=source.cwd)
            elif self.settings.token_env is not None:
                import httpx2
                from mcp.client.streamable_http import streamable_http_client

                token = os.environ.get(self.settings.token_env, "")
                http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=None)
                await stack.enter_async_context(http)
                server = streamable_http_client(source, http_client=http)
            else:
                server = source
            yield await stack.enter_async_context(mcp.Client(server))


async def _list_page(client: mcp.Client, cursor: str | None) -> mcp.types.ListToolsResult:
    return await client.list_tools(cursor=cursor)


class McpConnection:
    """One session's connection. A task of its own enters and leaves it, as the client's task groups demand.

    Args:
        server: what to connect to.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[mcp.Client] | None = None
        self._leave = asyncio.Event()

    async def open(self) -> None:
        """Connect. Raises `InfraError` if the server does not start or answer."""
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(self._ready), name=f"connection to {self._server.name}")
        seconds = self._server.settings.start_timeout
        waited: set[asyncio.Future[Any]] = {self._ready, self._task}
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            reason = self._end() if self._task.done() else f"no answer in {seconds:g} s"
            raise InfraError(f"{self._server.name} did not start: {reason}")

    async def use(self, call: Callable[[mcp.Client], Any]) -> Any:
        """Await a method of the client.

        Raises:
            InfraError: the server is lost.
            ToolError: the server refused the request.
        """
        import mcp
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        assert self._ready is not None
        assert self._task is not None
        if self._task.done():
            raise InfraError(f"{self._server.name} is lost: {self._end()}")
        work = asyncio.ensure_future(call(self._ready.result()))
        try:
            await asyncio.wait({work, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted = None
            if not work.done():
                work.cancel()
                interrupted = await outlast(work)
        if interrupted is not None:
            raise interrupted
        if work.cancelled():
            raise InfraError(f"{self._server.name} is lost: {self._end()}")
        with boundary(f"request to {self._server.name}"):
            try:
                return work.result()
            except mcp.MCPError as error:
                if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                    raise InfraError(f"{self._server.name} is lost: {error.message}") from error
                raise ToolError(f"Error: {error.message}") from error

    async def close(self) -> None:
        """Disconnect; with stdio this ends the server."""
        if self._task is None:
            return
        self._leave.set()
        try:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        finally:
            if not self._task.done():
                self._task.cancel()
            await asyncio.wait({self._task})
            self._end()

    async def _hold(self, ready: asyncio.Future[mcp.Client]) -> None:
        async with self._server.connect() as client:
            ready.set_result(client)
            await self._leave.wait()

    def _end(self) -> str:
        """How the connection's task ended, in words."""
        assert self._task is not None
        if not self._task.done() or self._task.cancelled():
            return "the connection was closed"
        error = self._task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return "the connection was closed" if error is None else f"{type(error).__name__}: {error}"


class McpTool(BaseTool):
    """A tool of an MCP server; made by `mcp_tools`."""

    def __init__(self, server: McpServer, tool: mcp.Tool, prefix: str = "") -> None:
        function = {
            "name": prefix + tool.name,
            "description": tool.description or tool.title or "",
            "parameters": {"type": "object", "properties": {}, **tool.input_schema},
        }
        super().__init__({}, {"type": "function", "function": function})
        self.has_reward = False
        self._server = server
        self._remote_name = tool.name
        self._instances: dict[str, tuple[ToolContext, McpConnection]] = {}

    async def create(  # type: ignore[override]
        self, instance_id: str | None = None, *, context: ToolContext | None = None
    ) -> tuple[str, ToolResponse]:
        """Join the session's connection."""
        instance_id, response = await super().create(instance_id)
        context = context or ToolContext(session_id=instance_id)
        self._instances[instance_id] = (context, await self._server.sessions.join(context))
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the tool of the server."""
        _, connection = self._instances[instance_id]
        result: mcp.types.CallToolResult = await connection.use(
            lambda client: client.call_tool(self._remote_name, parameters)
        )
        response = read_content(result)
        if result.is_error:
            raise ToolError(response.text or f"Error: {self.name} failed without a message.")
        return response, None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Leave the connection; the last tool that leaves closes it."""
        context, _ = self._instances.pop(instance_id)
        await self._server.sessions.leave(context)


def read_content(result: mcp.types.CallToolResult) -> ToolResponse:
    """What an MCP server answered: its texts, line by line; images as data URLs; anything else by name."""
    texts: list[str] = []
    images: list[str] = []
    for item in result.content:
        match item.type:
            case "text":
                texts.append(item.text)
            case "image":
                images.append(f"data:{item.mime_type};base64,{item.data}")
            case "audio":
                texts.append(f"[audio, {item.mime_type}, not shown]")
            case "resource_link":
                texts.append(f"[{item.title or item.name}]({item.uri})")
            case "resource":
                text = getattr(item.resource, "text", None)
                texts.append(text if isinstance(text, str) else f"[binary data of {item.resource.uri}, not shown]")
    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=images)
