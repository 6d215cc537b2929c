from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from agentgym.tool import FunctionTool
from agentgym.tool_files import load_tools
from agentgym.tools.server import ServerLimits, ToolServer
from agentgym.tools.serving import Address, Service

TOKEN = "the-token"
FILE = Path(__file__).with_name("served_tools.py")


@pytest.fixture
def module() -> ModuleType:
    """The module of the served tools, as the server of this process has it."""
    tool = load_tools(FILE)[0]
    assert isinstance(tool, FunctionTool)
    found = sys.modules[tool.fn.__module__]
    found.LOG.clear()
    return found


class Running:
    """A server of this process, and a plain HTTP client of it."""

    def __init__(self, server: ToolServer, url: str, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.url = url
        self.http = http

    async def request(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, f"{self.url}{path}", **options) as response:
            return response.status, (await response.json() if await response.read() else None)

    async def open(self, key: str, **body: Any) -> str:
        status, info = await self.request("POST", "/sessions", json=body, headers={"Idempotency-Key": key})
        assert status == 201, info
        return str(info["session_id"])

    async def call(self, session: str, request_id: str, tool: str, /, **arguments: Any) -> tuple[int, Any]:
        body = {"request_id": request_id, "name": tool, "arguments": arguments}
        return await self.request("POST", f"/sessions/{session}/calls", json=body)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread, a process or a tool
            await asyncio.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition."""
    return _until


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serve(module: ModuleType) -> Serve:
    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Running]:
        limits = ServerLimits(**options.pop("limits", {}))
        server = ToolServer(load_tools(FILE), token=TOKEN, limits=limits, **options)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            Service(server.app, Address()) as service,
            aiohttp.ClientSession(headers=headers) as http,
        ):
            yield Running(server, service.url, http)

    return start
