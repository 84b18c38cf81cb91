"""Provide an index of a few pages, and a service for it."""

from __future__ import annotations

from typing import NamedTuple

import httpx
import pytest
from PIL import Image

from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest
from services.retriever.model import RetrieverBackend
from testing.servers import PATIENCE_S, running_service
from tests.kits.retrieval.pdf import draw_pdf
from tests.kits.retrieval.readers import forked_readers

#: document -> pages -> lines.
DECKS = {
    "trade": [
        ["Exports of steel", "grew by 4.5 percent"],
        ["Imports of rice", "fell to 1,200 tons"],
        ["Exports of rice", "stood at 300 tons"],
    ],
    "인구": [["대한민국의 인구는 오천만 명이다"], ["서울의 인구가 줄었다"]],
}


def make_sources(folder):
    """Write the PDFs, a scan without text and a damaged file."""
    folder.mkdir()
    for name, pages in DECKS.items():
        draw_pdf(folder / f"{name}.pdf", pages)
    Image.new("RGB", (64, 48), "red").save(folder / "scan_02.png")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 and no more")
    return folder


class BuiltIndex(NamedTuple):
    sources: object
    index: object
    manifest: object


@pytest.fixture(scope="module", autouse=True)
def quick_readers():
    """Fork the readers of this process. Those of commands start as a user's do."""
    with forked_readers():
        yield


@pytest.fixture(scope="session")
def built_index(tmp_path_factory) -> BuiltIndex:
    home = tmp_path_factory.mktemp("retriever")
    sources = make_sources(home / "sources")
    with forked_readers():
        manifest = ingest([sources], home / "index", [Bm25Builder("bigrams")], workers=1)
    return BuiltIndex(sources, home / "index", manifest)


@pytest.fixture(scope="module")
def url(built_index):
    with running_service(RetrieverBackend(built_index.index), max_samples=101) as url:
        yield url


@pytest.fixture
def ask(url):
    """Return a function that sends queries (texts or objects) and returns the results."""

    def ask(*queries, status=200, **more):
        body = {"queries": [{"query": q} if isinstance(q, str) else q for q in queries], **more}
        answer = httpx.post(f"{url}/v1/search", json=body, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text
        return answer.json()["results"] if status == 200 else answer.json()["error"]

    return ask
