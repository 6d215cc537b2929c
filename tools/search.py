"""``search``: finds documents in a corpus, through a retrieval service or an index in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import model_validator

from agentgym.config import ConfigModel, setting, validate
from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.pace import Pace
from agentgym.tool import BaseTool
from agentgym.tool_threads import run_in_thread
from agentgym.tools.retrieval import MAX_TOPK, Bm25Index, read_corpus
from agentgym.types import ToolResponse

TURN_WAIT = 30.0
"""Seconds that a call may wait for its turn, beside the time of its requests."""
MAX_RETRY_AFTER = 30.0

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches a collection of documents and returns the passages that fit the query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


class SearchConfig(ConfigModel):
    """Settings of the search tool, as they stand under ``config`` in a tool file."""

    url: str | None = setting(None, "Address of the retrieval service's endpoint, e.g. http://127.0.0.1:8001/retrieve")
    corpus: Path | None = setting(None, "JSON-lines file to search in this process, instead of a service")
    topk: int = setting(3, "Passages per query", ge=1, le=MAX_TOPK)
    timeout: float = setting(10.0, "Seconds for one request to the service", gt=0)
    retries: int = setting(3, "Further attempts after a request that failed", ge=0)
    backoff: float = setting(0.25, "Seconds before the first retry, doubled for each further one", ge=0)
    max_concurrency: int = setting(32, "Requests at the same time, over all sessions of a process", ge=1)
    rate_limit: float | None = setting(
        None, "Requests per second, over all sessions of a process; null: no limit", gt=0
    )
    token_env: str | None = setting(None, "Environment variable with the bearer token of the service")
    max_characters: int = setting(2_000, "Characters of one passage; the rest is cut", ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> SearchConfig:
        if self.url is not None and self.corpus is not None:
            raise ValueError("url and corpus: expected one of them, not both")
        return self


class SearchTool(BaseTool):
    """The search tool; one object serves all sessions of a process and keeps their limits together.

    A service that cannot be reached, times out or is overloaded is asked again; then the call raises `InfraError`, so
    that the rollout counts as failed and is never a bad answer of the model.

    Example:
        >>> tool = SearchTool(index=Bm25Index(documents))
        >>> tool = SearchTool({"url": "http://127.0.0.1:8001/retrieve", "topk": 5, "rate_limit": 20})

    Args:
        config: see `SearchConfig`; needs ``url`` or ``corpus`` unless an index is given.
        tool_schema: for another name or description; the one parameter is ``query``.
        index: what to search, instead of a service.

    Raises:
        ConfigError: wrong settings, or an unreadable corpus.
    """

    tool_schema = SCHEMA

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
        *,
        index: Bm25Index | None = None,
    ) -> None:
        super().__init__(config, tool_schema)
        self.settings = settings = validate(SearchConfig, self.config)
        if index is None and settings.corpus is not None:
            index = load_index(settings.corpus)
        if index is None and settings.url is None:
            raise ConfigError(f"tool {self.name!r}: neither url nor corpus is set; expected one of them in its config")
        self.index = index
        self.timeout = TURN_WAIT + sum(
            settings.timeout + settings.backoff * 2**attempt for attempt in range(settings.retries + 1)
        )
        self._throttle = Throttle(settings.max_concurrency, settings.rate_limit)
        self._clients: dict[str, aiohttp.ClientSession] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make the session's connection, where a service is asked."""
        instance_id, response = await super().create(instance_id)
        if self.index is None:
            token = os.environ.get(self.settings.token_env or "", "")
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            self._clients[instance_id] = aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar())
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Search once."""
        query, settings = parameters["query"], self.settings
        if self.index is not None:
            hits = await run_in_thread(self.index.search, query, settings.topk)
            passages = [hit.document.contents for hit in hits]
        else:
            passages = await self._ask(self._clients[instance_id], query)
        return ToolResponse(text=self._write(passages)), None, {"passages": len(passages)}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Close the session's connection."""
        client = self._clients.pop(instance_id, None)
        if client is not None:
            await client.close()

    async def _ask(self, client: aiohttp.ClientSession, query: str) -> list[str]:
        settings = self.settings
        reason = ""
        for attempt in range(settings.retries + 1):
            wait = settings.backoff * 2 ** (attempt - 1) if attempt else 0.0
            async with self._throttle.turn(wait):
                try:
                    answer, reason = await self._request(client, query)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                    answer, reason = None, f"{type(error).__name__} {error}".strip()
            if answer is not None:
                return answer
        raise InfraError(f"tool {self.name!r}: {settings.url} failed {settings.retries + 1} times, at last: {reason}")

    async def _request(self, client: aiohttp.ClientSession, query: str) -> tuple[list[str] | None, str]:
        """The passages, or None and why the request may be sent again."""
        settings = self.settings
        body = {"queries": [query], "topk": settings.topk, "return_scores": True}
        timeout = aiohttp.ClientTimeout(total=settings.timeout)
        async with client.post(settings.url or "", json=body, timeout=timeout) as response:
            if response.status in _RETRIED:
                self._throttle.pause(_retry_after(response))
                return None, f"HTTP {response.status} {response.reason}"
            text = await response.text()
            if response.status != 200:
                raise EnvError(f"tool {self.name!r}: {settings.url} answered HTTP {response.status}: {text[:300]}")
        return _read_passages(text, f"tool {self.name!r}: {settings.url}"), ""

    def _write(self, passages: Sequence[str]) -> str:
        if not passages:
            return "Nothing was found. Try other words."
        limit = self.settings.max_characters
        cut = [text if len(text) <= limit else f"{text[:limit]}..." for text in passages]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(cut, 1))


@functools.cache
def load_index(corpus: Path) -> Bm25Index:
    """The index of a corpus file, made once per process."""
    return Bm25Index(read_corpus(corpus))


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the service asks for; 0 where it does not say, or gives a date."""
    try:
        return min(float(response.headers.get("Retry-After", "0")), MAX_RETRY_AFTER)
    except ValueError:
        return 0.0


def _read_passages(text: str, where: str) -> list[str]:
    try:
        [found] = json.loads(text)["result"]
        documents = [item.get("document", item) for item in found]
        return [str(document["contents"]) for document in documents]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvError(
            f'{where} answered {text[:200]!r}; expected {{"result": [[{{"document": {{"contents": ...}}}}, ...]]}}'
        ) from error


class Throttle:
    """Limits requests to so many at once and so many per second, in each event loop.

    Args:
        concurrency: at the same time.
        per_second: starts, evenly spaced; None: no limit.
    """

    def __init__(self, concurrency: int, per_second: float | None) -> None:
        self._concurrency = concurrency
        self._per_second = per_second
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, wait: float = 0.0) -> AsyncIterator[None]:
        """Wait ``wait`` seconds and for a free place, then hold it."""
        if wait:
            await asyncio.sleep(wait)
        turns = self._turns()
        async with turns.places:
            await turns.pace.wait()
            yield

    def pause(self, seconds: float) -> None:
        """Let no request start for so long."""
        self._turns().pace.pause(seconds)

    def _turns(self) -> _Turns:
        return self._loops.setdefault(asyncio.get_running_loop(), _Turns(self._concurrency, self._per_second))


class _Turns:
    """The state of a `Throttle` in one event loop."""

    def __init__(self, concurrency: int, per_second: float | None) -> None:
        self.places = asyncio.Semaphore(concurrency)
        self.pace = Pace(per_second)
