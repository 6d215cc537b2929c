"""A small retrieval service: BM25 over a corpus, in-process (`Bm25Index`) or over HTTP.

    python -m agentgym.tools.retrieval corpus.jsonl --port 8001

``POST /retrieve`` takes ``{"queries": ["..."], "topk": 3, "return_scores": true}`` and answers
``{"result": [[{"document": {"id", "title", "contents"}, "score"}, ...], ...]}``, one list per query, best first: the
protocol that search agents are usually trained with, so that other retrieval servers can stand in for this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from aiohttp import web
from bm25s.stopwords import STOPWORDS_EN
from pydantic import BaseModel, ConfigDict, Field

from agentgym.errors import ConfigError
from agentgym.tool_threads import run_in_thread
from agentgym.tools.serving import Address, Service, json_response, make_app, read_body, read_token, until_signal

MAX_QUERIES = 64
MAX_TOPK = 100
MAX_QUERY_LENGTH = 10_000

_STOPWORDS = frozenset(STOPWORDS_EN)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
"""A word; of scripts that are written without spaces, a character."""


@dataclass(frozen=True, slots=True)
class Document:
    """One entry of a corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text, as they are indexed and sent."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found; a higher score is better, always above 0."""

    document: Document
    score: float


class Bm25Index:
    """A BM25 index in memory. Read-only after construction, so threads may share it.

    Args:
        documents: at least one.
        k1: how soon further occurrences of a word stop to count.
        b: how much long documents are held back, 0 to 1.

    Raises:
        ConfigError: no documents, or none with a word in it.
    """

    def __init__(self, documents: Sequence[Document], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.documents = tuple(documents)
        words = [split_words(document.contents) for document in self.documents]
        if not any(words):
            raise ConfigError(
                f"a corpus of {len(self.documents)} documents has no words; expected at least one document"
            )
        self._known = {word for document in words for word in document}
        self._bm25 = bm25s.BM25(k1=k1, b=b)
        self._bm25.index(words, show_progress=False)

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """At most ``k`` documents that share a word with the query, best first; of equal ones the earlier first."""
        words = [word for word in split_words(query) if word in self._known]
        if not words or k < 1:
            return []
        scores = self._bm25.get_scores(words)
        if k < len(scores):
            least = np.partition(scores, -k)[-k]
            candidates = np.flatnonzero((scores >= least) & (scores > 0))
        else:
            candidates = np.flatnonzero(scores > 0)
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
        return [Hit(self.documents[i], float(scores[i])) for i in best]


def split_words(text: str) -> list[str]:
    """The words that count: case, accents and English stop words do not."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    plain = unicodedata.normalize("NFC", plain)
    return [word for word in _WORD.findall(plain) if word not in _STOPWORDS]


def read_corpus(path: Path) -> list[Document]:
    """The documents of a JSON-lines file: objects with ``text`` or ``contents``, and optionally ``id`` and ``title``.

    ``contents`` without a ``title`` has the title in its first line. A missing id is the line number.

    Raises:
        ConfigError: no such file, or a line of another form; the message names it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return [_read_document(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"corpus {str(path)!r} cannot be read: {error}") from error


def _read_document(path: Path, number: int, line: str) -> Document:
    where = f"corpus {str(path)!r}, line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    text = row.get("text", row.get("contents")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: expected an object with the key 'text' or 'contents', got {line.strip()[:80]!r}")
    title = str(row.get("title") or "")
    if not title and "text" not in row and "\n" in text:
        title, _, text = text.partition("\n")
    return Document(id=str(row.get("id", number)), title=title.strip().strip('"'), text=text.strip())


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``."""

    model_config = ConfigDict(extra="forbid")

    queries: list[str] = Field(min_length=1, max_length=MAX_QUERIES)
    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK)
    return_scores: bool = False


def retrieval_app(index: Bm25Index, *, topk: int = 3, token: str | None = None) -> web.Application:
    """The service as an aiohttp application.

    Args:
        index: what is searched, on threads.
        topk: documents per query where the request does not say.
        token: bearer token that requests need; None: none.
    """

    async def retrieve(request: web.Request) -> web.Response:
        body = await read_body(request, RetrieveRequest)
        k = body.topk or topk
        found = await run_in_thread(lambda: [index.search(query[:MAX_QUERY_LENGTH], k) for query in body.queries])
        return json_response(
            {
                "result": [
                    [_scored(hit) if body.return_scores else _document(hit.document) for hit in hits] for hits in found
                ]
            }
        )

    async def healthz(_: web.Request) -> web.Response:
        return json_response({"status": "ok", "documents": len(index.documents)})

    app = make_app(token=token, public=["/healthz"], limit=2**20)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/healthz", healthz)])
    return app


def _document(document: Document) -> dict[str, str]:
    return {"id": document.id, "title": document.title, "contents": document.contents}


def _scored(hit: Hit) -> dict[str, Any]:
    return {"document": _document(hit.document), "score": hit.score}


async def serve_retrieval(corpus: Path, address: Address, *, topk: int = 3, token_file: Path | None = None) -> None:
    """Serve a corpus until SIGINT or SIGTERM. A token is needed where one was chosen or others can connect."""
    token = None
    if token_file is not None or not address.local:
        token, _ = read_token(token_file, address)
    index = await run_in_thread(lambda: Bm25Index(read_corpus(corpus)))
    async with Service(retrieval_app(index, topk=topk, token=token), address) as service:
        sys.stdout.write(f"{len(index.documents)} documents at {service.url}/retrieve\n")
        sys.stdout.flush()
        await until_signal()


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m agentgym.tools.retrieval``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.tools.retrieval", description="Serve BM25 over a corpus.")
    parser.add_argument("corpus", type=Path, help="JSON lines with text (or contents), and optionally id and title")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0: a free one")
    parser.add_argument("--topk", type=int, default=3, help="documents per query where a request does not say")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token; needed for other hosts")
    options = parser.parse_args(arguments)
    address = Address(host=options.host, port=options.port)
    try:
        asyncio.run(serve_retrieval(options.corpus, address, topk=options.topk, token_file=options.token_file))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
