from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentgym.errors import ConfigError
from agentgym.tools.retrieval import Bm25Index, Document, main, read_corpus, retrieval_app, split_words
from agentgym.tools.serving import Address, Service

CITIES = [
    Document("1", "Zürich", "The largest city of Switzerland."),
    Document("2", "Bern", "The capital of Switzerland."),
    Document("3", "東京", "日本の首都。"),
    Document("4", "Copy of Bern", "The capital of Switzerland."),
    Document("5", "", "..."),
]


@pytest.fixture(scope="module")
def index() -> Bm25Index:
    return Bm25Index(CITIES)


def ids(index: Bm25Index, query: str, k: int = 10) -> list[str]:
    return [hit.document.id for hit in index.search(query, k)]


def test_the_best_document_comes_first_and_others_with_a_common_word_follow(index: Bm25Index) -> None:
    assert ids(index, "largest city in Switzerland") == ["1", "2", "4"]
    assert all(hit.score > 0 for hit in index.search("largest city in Switzerland"))


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    same = Bm25Index([Document(str(i), "", "one and the same text") for i in range(50)])
    assert ids(same, "same text", 7) == [str(i) for i in range(7)]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "unknownword", "!!!", "\x00"])
def test_a_query_without_known_words_finds_nothing(index: Bm25Index, query: str) -> None:
    assert ids(index, query) == []


def test_case_and_accents_do_not_matter_and_scripts_without_spaces_are_found(index: Bm25Index) -> None:
    assert ids(index, "ZURICH") == ["1"]
    assert ids(index, "日本") == ["3"]
    assert split_words("The Straße of Ａ1, don't") == ["strasse", "a1", "don", "t"]


def test_k_limits_the_hits(index: Bm25Index) -> None:
    assert ids(index, "Switzerland", 1) == ["2"]
    assert ids(index, "Switzerland", 0) == []


def test_a_corpus_without_words_is_refused() -> None:
    for documents in ([], [Document("1", "", "the ...")]):
        with pytest.raises(ConfigError, match="has no words"):
            Bm25Index(documents)


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_corpus_files_of_both_spellings(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": 7, "title": "A", "text": "x\ny"}, "", {"contents": '"B"\nz'}, {"text": "only"})
    assert read_corpus(path) == [Document("7", "A", "x\ny"), Document("3", "B", "z"), Document("4", "", "only")]


@pytest.mark.parametrize(
    ("row", "words"), [("{", "line 2: not JSON"), ("[1]", "line 2: expected"), ('{"a": 1}', "'text'")]
)
def test_a_wrong_line_of_a_corpus_is_named(tmp_path: Path, row: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_corpus(write(tmp_path, {"text": "good"}, row))


def test_a_missing_corpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "--port", "0"]) == 2
    assert "none.jsonl' cannot be read" in capsys.readouterr().err


async def test_the_service_answers_in_both_forms(index: Bm25Index) -> None:
    async with Service(retrieval_app(index, topk=1), Address()) as service, aiohttp.ClientSession() as client:
        async with client.post(f"{service.url}/retrieve", json={"queries": ["bern", "nothing"]}) as response:
            assert await response.json() == {
                "result": [[{"id": "2", "title": "Bern", "contents": "Bern\nThe capital of Switzerland."}], []]
            }
        body = {"queries": ["capital"], "topk": 2, "return_scores": True}
        async with client.post(f"{service.url}/retrieve", json=body) as response:
            [found] = (await response.json())["result"]
        assert [hit["document"]["id"] for hit in found] == ["2", "4"]
        assert found[0]["score"] >= found[1]["score"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "queries: Field required"),
        (b'{"queries": []}', "queries: "),
        (b'{"queries": ["a"], "topk": 0}', "topk: "),
        (b'{"queries": ["a"], "top_k": 3}', "top_k: "),
    ],
)
async def test_bad_requests_are_refused_with_words(index: Bm25Index, body: bytes, words: str) -> None:
    async with (
        Service(retrieval_app(index), Address()) as service,
        aiohttp.ClientSession() as client,
        client.post(f"{service.url}/retrieve", data=body) as response,
    ):
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]


async def test_the_service_as_a_process_ends_cleanly(tmp_path: Path) -> None:
    corpus = write(tmp_path, {"text": "hello world"})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentgym.tools.retrieval", str(corpus), "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    url = line.split(" at ")[1].strip()
    async with aiohttp.ClientSession() as client, client.post(url, json={"queries": ["world"]}) as response:
        assert (await response.json())["result"][0][0]["contents"] == "hello world"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
