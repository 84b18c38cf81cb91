"""Test the backends that search by vectors: their hits, and a server that is down."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import Response
from safetensors.numpy import save_file

from scorekit.errors import RequestError, ServiceUnreachable, UserError
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.backends.dense import DenseBuilder
from services.retriever.backends.late import LateBuilder, VectorFile
from services.retriever.backends.opening import Servers
from services.retriever.index.ingest import ingest
from services.retriever.index.store import Index
from services.retriever.model import RetrieverBackend
from testing.fake_embedder import FakeEmbedder, vector_of
from testing.servers import PATIENCE_S, running_app, running_service
from tests.kits.retrieval.fake_pooling import FakePooling, picture_vectors, text_vectors
from tests.kits.retrieval.pdf import draw_pdf

QUERIES = ["steel exports", "rice", "percent grew", "rice fell tons"]


@pytest.fixture(scope="module")
def pooling():
    fake = FakePooling()
    with running_app(fake.app) as url:
        yield SimpleNamespace(fake=fake, url=url)


@pytest.fixture(scope="module")
def embedder_url():
    with running_service(FakeEmbedder()) as url:
        yield url


@pytest.fixture(scope="module")
def index(built_index, pooling, embedder_url, tmp_path_factory):
    """Build an index of the same pages for three backends."""
    folder = tmp_path_factory.mktemp("vectors") / "index"
    builders = [
        Bm25Builder("bigrams"),
        DenseBuilder(embedder_url),
        LateBuilder(pooling.url, "col", prompt="Describe the image."),
    ]
    ingest([built_index.sources], folder, builders, workers=1)
    return folder


@pytest.fixture(scope="module")
def servers(pooling, embedder_url):
    return Servers(embedder_url, None, pooling.url)


def search(url, queries, **more):
    body = {"queries": [{"query": query} for query in queries], "cache": False, **more}
    answer = httpx.post(f"{url}/v1/search", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def ranked(result):
    assert result["ok"], result
    return [(hit["page_id"], hit["score"]) for hit in result["hits"]]


def has_pages(result, want):
    """Check that a result has these pages, in an order that their scores allow."""
    got = dict(ranked(result))
    assert set(got) == set(want)
    assert all(abs(got[page] - want[page]) < 1e-5 for page in want)
    scores = [score for _, score in ranked(result)]
    assert scores == sorted(scores, reverse=True)


def pages_of(folder):
    return Index(folder).open()[1]


def dense_scores(folder, query):
    """Compute the scores by brute force, in float64."""
    query_vector = vector_of(query.split()).astype(np.float64)
    pages = {page.page_id: page.text for page in pages_of(folder) if page.text}
    return {page: float(vector_of(text.split()) @ query_vector) for page, text in pages.items()}


def late_scores(folder, query):
    query_vectors = text_vectors(query).astype(np.float64)
    score_by_page = {}
    for page in pages_of(folder):
        png = Index(folder).paths.image_path(page.picture).read_bytes()
        score_by_page[page.page_id] = float((query_vectors @ picture_vectors(png).T).max(1).sum())
    return score_by_page


def test_dense_finds_what_brute_force_finds(index, servers):
    with running_service(RetrieverBackend(index, "dense", servers)) as url:
        for query, result in zip(QUERIES, search(url, QUERIES), strict=True):
            has_pages(result, dense_scores(index, query))
        (top,) = search(url, ["rice"], top_k=2)
        want = sorted(dense_scores(index, "rice").values(), reverse=True)[:2]
        assert [score for _, score in ranked(top)] == pytest.approx(want, abs=1e-5)
        info = httpx.get(f"{url}/v1/info").json()
    assert info["backend"] == "dense" and info["settings"]["dense"]["model"] == "fake"
    # It has no text: reported, and no hit.
    assert info["settings"]["dense"]["without"] == ["scan_2"]


def test_late_interaction_finds_what_brute_force_finds_scans_too(index, servers):
    with running_service(RetrieverBackend(index, "late", servers)) as url:
        for query, result in zip(QUERIES, search(url, QUERIES), strict=True):
            want = late_scores(index, query)
            assert "scan_2" in want
            has_pages(result, want)


def test_hybrid_fuses_the_ranks_of_all(index, servers):
    with running_service(RetrieverBackend(index, None, servers)) as url:
        (result,) = search(url, ["rice"])
        assert httpx.get(f"{url}/v1/info").json()["backend"] == "hybrid"
    with running_service(RetrieverBackend(index, "bm25")) as url:
        words = dict(ranked(search(url, ["rice"])[0]))
    want = {}
    for scores in (words, dense_scores(index, "rice"), late_scores(index, "rice")):
        for page, score in scores.items():  # equal scores share the best rank
            rank = 1 + sum(other > score for other in scores.values())
            want[page] = want.get(page, 0) + 1 / (60 + rank)
    assert words["trade_2"] == words["trade_3"]
    has_pages(result, want)


def test_without_its_server_a_query_fails_and_the_service_does_not(
    index, pooling, embedder_url, no_second_try
):
    embedder = running_service(FakeEmbedder())
    servers = Servers(embedder.__enter__(), None, pooling.url)
    with running_service(RetrieverBackend(index, "hybrid", servers)) as url:
        assert search(url, ["rice"])[0]["ok"]
        embedder.__exit__(None, None, None)
        (failed,) = search(url, ["rice"])
        assert not failed["ok"] and failed["error"]["type"] == "upstream"
        assert failed["error"]["retryable"] and "127.0.0.1" not in failed["error"]["message"]
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert httpx.get(f"{url}/v1/pages/trade_1").status_code == 200


class ZeroEmbedder(FakeEmbedder):
    """An embedder that returns zeros for a text that has this word."""

    def __init__(self, word):
        super().__init__()
        self.word = word

    def forward(self, batch):
        outcomes = super().forward(batch)
        for sample, outcome in zip(batch, outcomes, strict=True):
            if self.word in sample.payload:
                outcome["embedding"] = np.zeros(self.dimension, np.float32)
        return outcomes


def test_a_server_of_zeros_fails_the_query_and_makes_no_index(built_index, index, tmp_path):
    with running_service(ZeroEmbedder("rice")) as server:
        with running_service(RetrieverBackend(index, "dense", Servers(server))) as url:
            (failed,) = search(url, ["rice"])
            assert not failed["ok"] and failed["error"]["type"] == "upstream"
            assert search(url, ["steel exports"])[0]["ok"]
        with pytest.raises(RequestError, match="zeros"):
            ingest([built_index.sources], tmp_path / "index", [DenseBuilder(server)])
    assert Index(tmp_path / "index").manifest() is None


@pytest.mark.parametrize(
    "response",
    [
        Response(status_code=500),
        Response(status_code=429),
        Response("<html>", media_type="text/html"),
        Response('{"data": []}'),
        Response('{"data": [{"index": 0, "data": [[1, NaN]]}]}'),
        Response('{"data": [{"index": 0, "data": [[1.0, 2.0]]}]}'),  # another dimension
        Response(f'{{"data": [{{"index": 0, "data": {[[0.0] * 16]}}}]}}'),  # no direction
        Response('{"data": [{"index": 0, "data": "AAAA"}]}'),
        Response("[1]"),
        Response(status_code=404),
    ],
    ids=lambda response: f"{response.status_code} {response.body[:24]!r}",
)
def test_a_pooling_server_that_answers_wrongly_fails_the_query(
    index, pooling, no_second_try, response
):
    with running_service(RetrieverBackend(index, "late", Servers(late_url=pooling.url))) as url:
        pooling.fake.error_response = response
        try:
            (failed,) = search(url, ["rice"])
        finally:
            pooling.fake.error_response = None
        assert not failed["ok"] and failed["error"]["type"] == "upstream"
        assert search(url, ["rice"])[0]["ok"]


def test_another_model_behind_the_url_is_refused(index, no_second_try):
    other = FakePooling(salt=0.5)
    with running_app(other.app) as url:
        with pytest.raises(UserError, match="model is not the one that built the index"):
            RetrieverBackend(index, "late", Servers(late_url=url)).load()
    with running_service(FakeEmbedder(dimension=16)) as url:
        with pytest.raises(UserError, match="--embeddings-url"):
            RetrieverBackend(index, "dense", Servers(url)).load()
    with pytest.raises(UserError, match="--late-url: the index uses col"):
        RetrieverBackend(index, "late").load()
    with pytest.raises(UserError, match="--embeddings-url: "):
        RetrieverBackend(index, "dense", Servers("http://127.0.0.1:9/none")).load()


def test_vectors_that_were_paid_for_are_asked_for_once(built_index, index, pooling):
    num_images = pooling.fake.num_images
    manifest = ingest(
        [built_index.sources], index.parent / "late", [LateBuilder(pooling.url, "col")]
    )
    assert (
        pooling.fake.num_images == num_images + manifest.pages
    )  # another folder has its own cache
    ingest([built_index.sources], index.parent / "late", [LateBuilder(pooling.url, "col")])
    assert pooling.fake.num_images == num_images + manifest.pages
    ingest(
        [built_index.sources], index.parent / "late", [LateBuilder(pooling.url, "col", prompt="?")]
    )
    assert pooling.fake.num_images == num_images + 2 * manifest.pages


def test_a_server_that_stops_midway_costs_only_what_was_not_kept(
    built_index, pooling, tmp_path, no_second_try
):
    builder = LateBuilder(pooling.url, "col")
    pooling.fake.error_response = Response(status_code=500)
    try:
        with pytest.raises(Exception, match="HTTP 500"):
            ingest([built_index.sources], tmp_path / "index", [builder])
    finally:
        pooling.fake.error_response = None
    assert Index(tmp_path / "index").manifest() is None  # no incomplete index
    assert ingest([built_index.sources], tmp_path / "index", [builder]).pages == 6


def test_a_text_over_the_models_limit_is_embedded_in_pieces(embedder_url, tmp_path):
    lines = [[f"w{k} w{k + 1} w{k + 2} w{k + 3}" for k in range(0, 96, 4)] + ["needle"]]
    draw_pdf(tmp_path / "long.pdf", lines, size=3)
    draw_pdf(tmp_path / "short.pdf", [["other words"]])
    index = tmp_path / "index"
    manifest = ingest(
        [tmp_path / "long.pdf", tmp_path / "short.pdf"], index, [DenseBuilder(embedder_url)]
    )
    assert manifest.backends["dense"]["without"] == []
    with running_service(RetrieverBackend(index, servers=Servers(embedder_url))) as url:
        (result,) = search(url, ["w92 w93 w94 w95 needle"])
    assert ranked(result)[0][0] == "long_1"


def file_index(built_index, folder, path, **options):
    ingest([built_index.sources], folder, [VectorFile(path, "col", **options)])
    return folder


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_vectors_from_a_file(built_index, pooling, tmp_path, kind):
    pages = pages_of(built_index.index)
    png = Index(built_index.index).paths.image_path
    vectors = {p.page_id: picture_vectors(png(p.picture).read_bytes()) for p in pages}
    path = tmp_path / f"vectors.{kind}"
    if kind == "npz":
        np.savez(path, **{name: vector.astype(np.float16) for name, vector in vectors.items()})
    else:
        save_file(vectors, path)
    index = file_index(built_index, tmp_path / "index", path)
    with running_service(RetrieverBackend(index, servers=Servers(late_url=pooling.url))) as url:
        (result,) = search(url, ["rice"])
    want = late_scores(index, "rice")
    got = dict(ranked(result))
    assert got.keys() == want.keys()
    assert all(abs(got[page] - want[page]) < 1e-2 for page in want)


def test_an_approximate_index_says_so_and_a_damaged_one_is_refused(built_index, pooling, tmp_path):
    pages = pages_of(built_index.index)
    png = Index(built_index.index).paths.image_path
    vectors = {p.page_id: picture_vectors(png(p.picture).read_bytes()) for p in pages}
    save_file(vectors, tmp_path / "v.safetensors")
    servers = Servers(late_url=pooling.url)
    infos = []
    for approximate in (None, True):  # so few pages are searched exactly unless asked for
        index = file_index(
            built_index, tmp_path / "index", tmp_path / "v.safetensors", approximate=approximate
        )
        with running_service(RetrieverBackend(index, servers=servers)) as url:
            has_pages(search(url, ["rice"])[0], late_scores(index, "rice"))
            infos.append(httpx.get(f"{url}/v1/info").json())
    exact, approximate = infos
    assert "approximate" not in exact["settings"]["late"]
    assert approximate["settings"]["late"]["approximate"]["candidates"] == 400
    assert exact["revision"] != approximate["revision"]
    (path,) = index.rglob("candidates.faiss")
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-1] + b"?"), path.unlink):
        damage()
        with pytest.raises(UserError, match="the files are damaged"):
            RetrieverBackend(index, servers=servers).load()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("trade_2"), "no vectors for trade_2"),
        (lambda v: v.update(other_1=v["trade_1"]), "not pages of the index: other_1"),
        (lambda v: v.update(trade_1=np.ones(4)), "trade_1: an array of 1 dimensions"),
        (lambda v: v.update(trade_1=np.full((2, 4), np.nan)), "not finite"),
        (lambda v: v.update(trade_1=np.eye(4) * [[1], [1], [0], [1]]), "trade_1: a vector of zer"),
        (lambda v: v.update(trade_1=np.ones((2, 3))), "of 2 dimensions"),
        (lambda v: v.update(trade_1=np.array([[{}]], object)), "cannot be read"),
    ],
)
def test_a_file_of_other_vectors_is_refused(built_index, tmp_path, change, words):
    vectors = {page.page_id: np.ones((3, 4), np.float32) for page in pages_of(built_index.index)}
    change(vectors)
    np.savez(tmp_path / "v.npz", **vectors)
    with pytest.raises(UserError, match=words):
        file_index(built_index, tmp_path / "index", tmp_path / "v.npz")
    assert Index(tmp_path / "index").manifest() is None


def test_a_server_that_is_not_there_is_said_before_anything_is_read(
    built_index, tmp_path, no_second_try
):
    with pytest.raises(ServiceUnreachable):
        ingest([built_index.sources], tmp_path / "i", [LateBuilder("http://127.0.0.1:9", "col")])
    assert not (tmp_path / "i").exists()


def test_the_bodies_are_what_vllm_reads(pooling):
    """Check vLLM's own field names (vllm/entrypoints/pooling), as its classes read them."""
    client = LateBuilder(pooling.url, "col", prompt="p")._client
    body = json.loads(client._body(messages=[client._message(b"x")]))
    assert body == {
        "model": "col",
        "task": "token_embed",
        "encoding_format": "float",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
                    {"type": "text", "text": "p"},
                ],
            }
        ],
    }
