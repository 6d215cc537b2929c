"""The HTTP face of recorders: OpenAI-compatible chat completions, and the records of each session.

    POST /v1/chat/completions          also below /s/KEY; tools, streaming, logprobs
    GET  /v1/models
    GET  /sessions/KEY                 the recorded segments: ids, masks, log-probs
    POST /sessions/KEY/reward          {"reward": 1.0}
    DELETE /sessions/KEY               ends the session; its record is handed on

Which session a request belongs to: the path (``/s/KEY/v1``), else the header ``X-Session``, else the API key.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from agentgym.errors import AgentGymError, ConfigError, InfraError
from agentgym.proxy.recorder import Completion, ContextExceeded, Recorder, Wishes

DEFAULT_KEY = "default"
"""The session of requests that name none."""
MAX_BODY = 64 * 1024 * 1024


@dataclass(slots=True)
class ProxySession:
    """A session and what is known of its end."""

    key: str
    recorder: Recorder
    reward: float | None = None
    started: float = field(default_factory=time.monotonic)


class ProxyServer:
    """Serves sessions over HTTP.

    Args:
        model: the name that clients see.
        make_recorder: called once for each new session key; raises `ConfigError` for a key that is not allowed.
        ended: is given each session that ends, by DELETE or at the server's end.
    """

    def __init__(
        self,
        *,
        model: str,
        make_recorder: Callable[[str], Recorder],
        ended: Callable[[ProxySession], None] | None = None,
    ) -> None:
        self.model = model
        self.sessions: dict[str, ProxySession] = {}
        self._make_recorder = make_recorder
        self._ended = ended
        self.app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        for prefix in ("", "/s/{key}"):
            self.app.router.add_post(f"{prefix}/v1/chat/completions", self._completions)
            self.app.router.add_get(f"{prefix}/v1/models", self._models)
        self.app.router.add_get("/sessions/{key}", self._show)
        self.app.router.add_post("/sessions/{key}/reward", self._reward)
        self.app.router.add_delete("/sessions/{key}", self._end)

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen; the value is the base URL for clients, ending with ``/v1``. All sessions end with the block."""
        # A client that goes away cancels its generation.
        runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError(f"port={port}: cannot listen on {host}: {error.strerror}. Choose another") from error
            yield f"http://{host}:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()
            for key in list(self.sessions):
                self._finish(key)

    def session(self, key: str) -> ProxySession:
        """The session of that key; made at the first request."""
        if key not in self.sessions:
            self.sessions[key] = ProxySession(key, self._make_recorder(key))
        return self.sessions[key]

    def _finish(self, key: str) -> None:
        session = self.sessions.pop(key)
        if self._ended is not None:
            self._ended(session)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        wishes = read_wishes(body)
        tools = [] if body.get("tool_choice") == "none" else list(body.get("tools") or ())
        recorder = self.session(session_key(request)).recorder
        completion = await recorder.complete(body.get("messages") or (), tools, wishes)
        answer = _answer(completion, recorder, body, self.model)
        return await _stream(request, answer, body) if body.get("stream") else web.json_response(answer)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "agentgym"}
        return web.json_response({"object": "list", "data": [model]})

    async def _show(self, request: web.Request) -> web.Response:
        session = self._known(request)
        segments = [asdict(output) for output in session.recorder.outputs()]
        return web.json_response({"key": session.key, "reward": session.reward, "segments": segments})

    async def _reward(self, request: web.Request) -> web.Response:
        reward = (await _json_object(request)).get("reward")
        if not isinstance(reward, int | float):
            raise ConfigError(f"reward={reward!r}: expected a number")
        self._known(request).reward = float(reward)
        return web.json_response({"reward": reward})

    async def _end(self, request: web.Request) -> web.Response:
        self._finish(self._known(request).key)
        return web.json_response({"ended": True})

    def _known(self, request: web.Request) -> ProxySession:
        key = request.match_info["key"]
        if key not in self.sessions:
            raise web.HTTPNotFound(text=f"no session {key!r}")
        return self.sessions[key]


def session_key(request: web.Request) -> str:
    """Which session a request belongs to."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return request.match_info.get("key") or request.headers.get("X-Session") or bearer or DEFAULT_KEY


def read_wishes(body: Mapping[str, Any]) -> Wishes:
    """What a request asks for. Raises `ConfigError` for what cannot be given."""
    if body.get("n") not in (None, 1):
        raise ConfigError(f"n={body['n']}: one answer per request; ask again for another")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise ConfigError("response_format: only text; this engine does not constrain what it samples")
    stop = body.get("stop") or ()
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise ConfigError(f"max_tokens={limits[0]!r}: expected a whole number of at least 1")
    return Wishes(
        max_tokens=min(limits, default=None),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        seed=body.get("seed"),
        stop=[stop] if isinstance(stop, str) else list(stop),
    )


def _answer(completion: Completion, recorder: Recorder, body: Mapping[str, Any], model: str) -> dict[str, Any]:
    message = completion.message
    shown: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        shown["content"] = message["content"] or None
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    generation = completion.generation
    choice: dict[str, Any] = {"index": 0, "message": shown, "finish_reason": completion.finish_reason, "logprobs": None}
    if body.get("logprobs"):
        pairs = zip(generation.token_ids, generation.logprobs, strict=True)
        choice["logprobs"] = {"content": [_logprob(recorder, token, logprob) for token, logprob in pairs]}
    prompt, written = len(completion.prompt_ids), len(generation.token_ids)
    answer = {
        "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = list(generation.token_ids)
        answer["prompt_token_ids"] = list(completion.prompt_ids)
    return answer


def _logprob(recorder: Recorder, token: int, logprob: float) -> dict[str, Any]:
    text = recorder.renderer.tokenizer.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


async def _stream(request: web.Request, answer: dict[str, Any], body: Mapping[str, Any]) -> web.StreamResponse:
    """The answer as server-sent events, in small pieces. It is complete by then: a turn is sampled as a whole."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    base = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice, message = answer["choices"][0], answer["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in re.findall(r"\s*\S+\s*|\s+", message["content"] or "")]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
    chunks = [_chunk(base, delta) for delta in deltas]
    chunks.append(_chunk(base, {}, choice["finish_reason"]))
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**base, "choices": [], "usage": answer["usage"]})
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _chunk(base: Mapping[str, Any], delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"the body is a {type(body).__name__}, expected an object")
    return body


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """agentgym's errors in the form of the API."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ContextExceeded as error:
        return _error(400, str(error), "context_length_exceeded")
    except ConfigError as error:
        return _error(400, str(error), "invalid_request_error")
    except InfraError as error:
        return _error(503, str(error), "engine_lost")
    except AgentGymError as error:
        return _error(500, str(error), type(error).__name__)


def _error(status: int, message: str, code: str) -> web.Response:
    body = {
        "error": {
            "message": message,
            "type": "invalid_request_error" if status == 400 else "server_error",
            "code": code,
        }
    }
    return web.json_response(body, status=status)
