from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.tool_files import load_tools
from agentgym.toolbox import Toolbox
from agentgym.tools.retrieval import Bm25Index, Document, retrieval_app
from agentgym.tools.search import SearchTool
from agentgym.tools.serving import Address, Service, json_response
from agentgym.types import ToolCall

DOCUMENTS = [Document("1", "Zürich", "largest city"), Document("2", "Bern", "capital " + "x" * 50)]


async def search(tool: SearchTool, query: str = "capital") -> str:
    toolbox = Toolbox([tool])
    try:
        [result] = await toolbox.execute([ToolCall(name=tool.name, arguments={"query": query})])
    finally:
        await toolbox.release()
    return result.response.text or ""


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/retrieve", answer)])
    async with Service(app, Address()) as service:
        yield f"{service.url}/retrieve"


def answer(*texts: str) -> web.Response:
    return json_response({"result": [[{"document": {"contents": text}, "score": 1.0} for text in texts]]})


async def test_a_service_and_an_index_in_the_process_give_the_same_text() -> None:
    index = Bm25Index(DOCUMENTS)
    local = SearchTool({"max_characters": 20}, index=index)
    async with Service(retrieval_app(index), Address()) as service:
        remote = SearchTool({"url": f"{service.url}/retrieve", "max_characters": 20})
        texts = [[await search(tool, query) for query in ("zurich capital", "nothing")] for tool in (local, remote)]
    assert texts[0] == texts[1]
    assert texts[0] == [
        "[1] Zürich\nlargest city\n\n[2] Bern\ncapital xxxxxxx...",
        "Nothing was found. Try other words.",
    ]


async def test_documents_without_scores_are_read_too() -> None:
    async def plain(_: web.Request) -> web.Response:
        return json_response({"result": [[{"id": "1", "contents": "text"}]]})

    async with serving(plain) as url:
        assert await search(SearchTool({"url": url})) == "[1] text"


async def test_a_service_that_recovers_is_asked_again() -> None:
    requests: list[int] = []

    async def flaky(request: web.Request) -> web.Response:
        requests.append(len(requests))
        if len(requests) == 1:
            assert request.transport is not None
            request.transport.abort()
        if len(requests) == 2:
            return web.Response(status=503)
        return answer("text")

    async with serving(flaky) as url:
        assert await search(SearchTool({"url": url, "backoff": 0.01})) == "[1] text"
    assert len(requests) == 3


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_service_that_stays_overloaded_is_an_infrastructure_failure(status: int) -> None:
    async def overloaded(_: web.Request) -> web.Response:
        return web.Response(status=status)

    async with serving(overloaded) as url:
        with pytest.raises(InfraError, match=f"failed 3 times, at last: HTTP {status}"):
            await search(SearchTool({"url": url, "retries": 2, "backoff": 0.001}))


async def test_a_service_that_hangs_or_is_not_there_is_an_infrastructure_failure() -> None:
    stop = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await stop.wait()
        return answer()

    async with serving(hang) as url:
        with pytest.raises(InfraError, match="TimeoutError"):
            await search(SearchTool({"url": url, "timeout": 0.1, "retries": 1, "backoff": 0.001}))
        stop.set()
    with pytest.raises(InfraError, match="ClientConnectorError"):
        await search(SearchTool({"url": url, "retries": 1, "backoff": 0.001}))


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (lambda: web.Response(status=404), "HTTP 404"),
        (lambda: web.Response(status=401, text="token?"), "HTTP 401: token?"),
        (lambda: web.Response(text="<html>"), "expected"),
        (lambda: json_response({"result": []}), "expected"),
        (lambda: json_response({"result": [[{"text": "a"}]]}), "expected"),
    ],
)
async def test_another_service_at_the_address_is_a_fault_and_not_asked_again(
    response: Callable[[], web.Response], words: str
) -> None:
    requests: list[int] = []

    async def other(_: web.Request) -> web.Response:
        requests.append(1)
        return response()

    async with serving(other) as url:
        with pytest.raises(EnvError, match=words):
            await search(SearchTool({"url": url}))
    assert len(requests) == 1


async def test_limits_hold_over_all_sessions() -> None:
    running: list[int] = []
    peak = 0

    async def count(_: web.Request) -> web.Response:
        nonlocal peak
        running.append(1)
        peak = max(peak, len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return answer("text")

    async with serving(count) as url:
        tool = SearchTool({"url": url, "max_concurrency": 3})
        assert await asyncio.gather(*[search(tool) for _ in range(12)]) == ["[1] text"] * 12
        assert peak == 3
        tool = SearchTool({"url": url, "rate_limit": 50})
        start = time.monotonic()
        await asyncio.gather(*[search(tool) for _ in range(6)])
        assert time.monotonic() - start >= 5 / 50


async def test_the_service_can_ask_for_a_pause() -> None:
    times: list[float] = []

    async def busy(_: web.Request) -> web.Response:
        times.append(time.monotonic())
        return answer("text") if len(times) > 1 else web.Response(status=429, headers={"Retry-After": "0.2"})

    async with serving(busy) as url:
        assert await search(SearchTool({"url": url, "backoff": 0.001})) == "[1] text"
    assert times[1] - times[0] >= 0.19


async def test_the_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    async with Service(retrieval_app(Bm25Index(DOCUMENTS), token="secret"), Address()) as service:
        url = f"{service.url}/retrieve"
        assert (await search(SearchTool({"url": url, "token_env": "MY_TOKEN"}))).startswith("[1] Bern")
        with pytest.raises(EnvError, match="missing bearer token"):
            await search(SearchTool({"url": url}))


async def test_in_a_tool_file_with_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "Bern", "text": "the capital"}\n')
    file = tmp_path / "tools.yaml"
    file.write_text(
        f"tools: [{{class_name: agentgym.tools.search:SearchTool, config: {{corpus: {tmp_path}/corpus.jsonl}}}}]"
    )
    [tool] = load_tools(file)
    assert isinstance(tool, SearchTool)
    assert await search(tool) == "[1] Bern\nthe capital"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither url nor corpus"),
        ({"url": "http://x", "corpus": "a.jsonl"}, "not both"),
        ({"url": "http://x", "top_k": 3}, "did you mean 'topk'|Did you mean 'topk'"),
        ({"url": "http://x", "rate_limit": 0}, "rate_limit"),
        ({"corpus": "/nowhere.jsonl"}, "cannot be read"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SearchTool(config)
