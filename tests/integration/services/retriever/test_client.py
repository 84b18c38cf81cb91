"""Test the client of the page retriever with a real service, and an index that changes
meanwhile."""

from __future__ import annotations

import io
import shutil

import httpx
import pytest
import uvicorn
from PIL import Image

from scorekit.errors import IndexChanged, RequestError, SampleError
from scorekit.retrieval.client import Retriever
from scorekit.server.app import create_app
from scorekit.server.run import service_config
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest
from services.retriever.model import RetrieverBackend
from services.retriever.settings import RetrieverSettings
from testing.servers import PATIENCE_S, running_app, wait_ready
from tests.kits.retrieval.pdf import draw_pdf


@pytest.fixture
def client(url):
    with Retriever(url, deadline_s=PATIENCE_S) as client:
        yield client


def ids(result):
    return result.type if isinstance(result, SampleError) else [hit.page_id for hit in result]


def test_searches_pages_and_pictures(client):
    assert client.info().pages == 6
    queries = ["rice", "zebra", "서울의 인구", " ", "x" * 200_000, "rice"]
    results = client.search(queries, 2, [["trade_2"], [], [], [], [], []])
    bad = "invalid_input"
    assert [ids(result) for result in results] == [
        ["trade_3"],
        [],
        ["인구_2", "인구_1"],
        bad,
        bad,
        ["trade_2", "trade_3"],
    ]
    hit = results[2][0]
    image = Image.open(io.BytesIO(client.image(hit.page_id)))
    page = client.page(hit.page_id)
    assert image.size == (page.width, page.height) == (hit.width, hit.height)
    assert page.boxes[0].text == "서울의 인구가 줄었다"


def test_more_queries_than_a_request_may_have(client, url):
    assert httpx.get(f"{url}/v1/info").json()["max_samples"] < 250
    results = client.search([f"steel {k}" for k in range(250)], 1)
    assert [ids(result) for result in results] == [["trade_1"]] * 250


def test_a_page_that_is_not_there(client):
    for page_id in ("trade_9", "../index", "..", ".", "a/b", "trade_1/image"):
        for ask in (client.page, client.image):
            with pytest.raises(RequestError) as error_info:
                ask(page_id)
            assert error_info.value.type == "not_found"


def served(index):
    settings = RetrieverSettings(index=index, cache="memory", stall_after=PATIENCE_S)
    return create_app(RetrieverBackend(index), settings), settings


def test_an_index_that_changes_under_a_run_is_told_and_never_mixed(tmp_path):
    """Check that a running service answers from its first index; a restarted one uses the new
    index."""
    sources = tmp_path / "sources"
    sources.mkdir()
    draw_pdf(sources / "deck.pdf", [["apples"], ["pears"]])
    index, builder = tmp_path / "index", [Bm25Builder("bigrams")]
    ingest([sources], index, builder, workers=1)
    app, settings = served(index)
    with running_app(app, service_config(app, settings)) as url:
        wait_ready(url)
        port = int(url.rpartition(":")[2])
        with Retriever(url, deadline_s=PATIENCE_S) as client:
            before = client.info()
            pears = client.image("deck_2")
            draw_pdf(sources / "deck.pdf", [["pears"], ["apples"]])
            shutil.rmtree(index / "done")
            assert ingest([sources], index, builder, workers=1).revision != before.revision
            assert ids(client.search(["pears"])[0]) == ["deck_2"]
            assert client.info() == before
            assert httpx.get(f"{url}/v1/pages/deck_2/image").content == pears
    restarted, settings = served(index)
    config = uvicorn.Config(restarted, log_config=None, lifespan="on", port=port)
    with running_app(restarted, config) as url, Retriever(url, deadline_s=PATIENCE_S) as other:
        wait_ready(url)
        assert ids(other.search(["pears"])[0]) == ["deck_1"]
        with Retriever(url, deadline_s=PATIENCE_S) as client:
            client.run(_remember(before.revision))
            for call in (
                lambda: client.search(["pears"]),
                lambda: client.image("deck_2"),
                lambda: client.page("deck_2"),
                client.info,
            ):
                with pytest.raises(IndexChanged):
                    call()


def _remember(revision):
    async def remember(client):
        client._seen.revision = revision

    return remember
