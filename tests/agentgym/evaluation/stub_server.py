"""A small OpenAI-compatible server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[int, Mapping[str, Any]], Any]
"""``(number of the request, its body) -> message | status code | "stall" | "reset" | "half"``."""


@dataclass
class Stub:
    """What the server saw."""

    script: Script
    url: str = ""
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    open: int = 0
    peak: int = 0
    delay: float = 0.0
    retry_after: str = "0"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.times.append(asyncio.get_running_loop().time())
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            await asyncio.sleep(self.delay)
            return await self._answer(request, body, self.script(number, body))
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], act: Any) -> web.StreamResponse:
        if isinstance(act, int):
            error = {"error": {"message": f"status {act}", "code": "context_length_exceeded" if act == 400 else None}}
            return web.json_response(error, status=act, headers={"Retry-After": self.retry_after})
        if act == "stall":
            await asyncio.sleep(60)
        if act == "reset":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        half = act == "half"
        message = {"content": "half of it"} if half else {"content": act} if isinstance(act, str) else act
        reason = "tool_calls" if message.get("tool_calls") else message.pop("finish_reason", "stop")
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        base = {"id": "x", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
            return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [{"role": "assistant"}]
        deltas += [{"content": letter} for letter in message.get("content") or ""]
        for index, call in enumerate(message.get("tool_calls", ())):
            text = call["function"]["arguments"]
            first = {**call, "index": index, "function": {**call["function"], "arguments": text[:3]}}
            deltas += [
                {"tool_calls": [first]},
                {"tool_calls": [{"index": index, "function": {"arguments": text[3:]}}]},
            ]
        for delta in deltas:
            await _send(response, {**base, "object": "chat.completion.chunk", "choices": [_choice(delta, None)]})
        if half:
            assert request.transport is not None
            request.transport.close()
            return response
        await _send(response, {**base, "object": "chat.completion.chunk", "choices": [_choice({}, reason)]})
        await _send(response, {**base, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason}


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@asynccontextmanager
async def serve(stub: Stub) -> AsyncIterator[Stub]:
    """The server on a free port; ``stub.url`` says where."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stub.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield stub
    finally:
        await runner.cleanup()


def call(name: str, arguments: Mapping[str, Any] | str, identity: str = "call_1") -> dict[str, Any]:
    """A tool call as the API writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}
