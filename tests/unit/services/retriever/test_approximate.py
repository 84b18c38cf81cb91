"""Check the approximate index: its candidates, their exact scores, and its files."""

from __future__ import annotations

import numpy as np
import pytest

from scorekit.errors import UserError
from services.retriever.backends.approximate import (
    Candidates,
    build_candidates,
    search_settings,
)
from services.retriever.backends.vectors import PackedVectors, of_length_one, pack
from services.retriever.index.store import digest_of

PAGES, EMPTY = 600, 7


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Build an index of pages of 3 to 8 vectors near some of 60 directions; one page has none."""
    draw = np.random.default_rng(0)
    directions = draw.standard_normal((60, 10))  # not a multiple of 8 bytes in 4 bits a number
    pages = []
    for k in range(PAGES):
        near = directions[draw.integers(0, 60, draw.integers(3, 9))]
        vectors = of_length_one(near + 0.4 * draw.standard_normal(near.shape))
        pages.append(vectors[:0] if k == EMPTY else vectors)
    folder = tmp_path_factory.mktemp("approximate")
    pack(pages, folder)
    return folder, build_candidates(folder), pages


@pytest.fixture(scope="module")
def searched(index):
    folder, settings, _ = index
    vectors = PackedVectors(folder, is_mapped=True)
    return vectors, Candidates(folder, settings | {"candidates": 100, "neighbors": 200}, vectors)


def queries(index, count=20):
    draw = np.random.default_rng(1)
    pages = [page for page in index[2] if len(page)]
    return [
        of_length_one(page + 0.2 * draw.standard_normal(page.shape)).astype(np.float32)
        for page in (pages[k] for k in draw.integers(0, len(pages), count))
    ]


def test_a_query_searches_the_same_share_of_a_larger_index():
    small = search_settings(lists=1_000, vectors=250_000, pages=2_000)
    assert (small["probes"], small["neighbors"], small["candidates"]) == (32, 4096, 400)
    large = search_settings(lists=12_000, vectors=36_000_000, pages=90_000)
    assert (large["probes"], large["neighbors"], large["candidates"]) == (200, 140_625, 3_600)


def test_the_best_pages_are_found_and_their_scores_are_exact(index, searched):
    vectors, candidates = searched
    exact = vectors.max_sim(queries(index))
    missed = 0
    for query, want in zip(queries(index), exact, strict=True):
        got = candidates.max_sim(query, 5)
        is_scored = got > -np.inf
        assert 5 <= is_scored.sum() <= 100 and not is_scored[EMPTY]
        # Two float32 sums of at most 8 products of vectors of length 1 each.
        np.testing.assert_allclose(got[is_scored], want[is_scored], rtol=1e-5)
        missed += len({*np.argsort(-want)[:5]} - {*np.flatnonzero(is_scored)})
    assert missed <= 2  # of 100; 100 pages by chance would miss 83


def test_a_query_gets_as_many_hits_as_it_asks_for(index, searched):
    vectors, candidates = searched
    (query,) = queries(index, 1)
    for hits in (5, 70, 120, PAGES):
        assert (candidates.max_sim(query, hits) > -np.inf).sum() >= min(hits, PAGES - 1)
    np.testing.assert_allclose(
        candidates.max_sim(query, PAGES), vectors.max_sim([query])[0], rtol=1e-5
    )


def test_the_same_vectors_give_the_same_files(index, tmp_path):
    folder, settings, pages = index
    pack(iter(pages), tmp_path)
    assert build_candidates(tmp_path) == settings
    assert digest_of(tmp_path) == digest_of(folder)


def test_fewer_vectors_than_lists_are_an_index_too(tmp_path):
    vectors = np.eye(3, dtype=np.float32)
    pack([vectors[:1], vectors[1:2]], tmp_path)
    settings = build_candidates(tmp_path)
    candidates = Candidates(tmp_path, settings, PackedVectors(tmp_path, is_mapped=True))
    assert candidates.max_sim(vectors[:1], 1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("content", [None, b"", b"no index"])
def test_an_index_that_cannot_be_read_is_one_line(index, tmp_path, content):
    if content is not None:
        (tmp_path / "candidates.faiss").write_bytes(content)
    with pytest.raises(UserError, match=r"candidates\.faiss: missing, or not readable .*again$"):
        Candidates(tmp_path, index[1], None)
