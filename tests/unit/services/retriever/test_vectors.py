"""Compare MaxSim, rankings and their fusion with plain implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import SampleError, UserError
from services.retriever.backends import vectors as module
from services.retriever.backends.opening import HybridSearcher
from services.retriever.backends.ranking import best
from services.retriever.backends.vectors import PackedVectors, VectorCache, checked_vectors, pack


def packed(folder, pages):
    pack(pages, folder)
    return PackedVectors(folder)


def by_hand(pages, query):
    """Compute MaxSim in float64, one page at a time."""
    return [
        float((query.astype(np.float64) @ page.astype(np.float64).T).max(1).sum())
        if len(page)
        else -np.inf
        for page in pages
    ]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([1, 8, 10_000]),
    st.sampled_from([0, 3, 64]),
)
def test_max_sim_is_the_plain_one_whatever_the_shapes(
    tmp_path_factory, seed, lengths, queries, at_once, limit
):
    draw = np.random.default_rng(seed)
    # All similarities below 0: a padded page would win with its zeros.
    pages = [draw.random((n, 4), np.float32) + 0.1 for n in lengths]
    query_vectors = [-draw.random((n, 4), np.float32) - 0.1 for n in queries]
    searched = packed(tmp_path_factory.mktemp("v"), pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_SIMILARITIES", at_once)
        patch.setattr(module, "_FEW_QUERY_VECTORS", limit)
        results = searched.max_sim(query_vectors)
    for scores, query in zip(results, query_vectors, strict=True):
        # A sum of at most 5 dot products of 4 numbers below 1.1 in float32.
        np.testing.assert_allclose(scores, by_hand(pages, query), rtol=1e-5)


def test_packed_vectors_are_the_file_that_numpy_would_write(tmp_path):
    pages = [np.full((n, 3), n, np.float32) for n in (1, 0, 12_345)]
    pack(iter(pages), tmp_path)
    np.save(tmp_path / "whole.npy", np.concatenate(pages))
    assert (tmp_path / "values.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_no_vectors_at_all_and_several_dimensions_are_refused(tmp_path):
    with pytest.raises(UserError, match="for no page"):
        pack([np.zeros((0, 1), np.float32)], tmp_path)
    with pytest.raises(UserError, match="of 2 dimensions"):
        pack([np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)], tmp_path)


def test_a_vector_of_zeros_is_none_and_an_index_with_one_is_refused(tmp_path):
    good = np.array([[1, 0], [0, -1]], np.float32)
    assert checked_vectors(good).tolist() == good.tolist()
    with pytest.raises(ValueError, match="a vector of zeros"):
        checked_vectors(good * [[1], [0]])
    assert packed(tmp_path, [good]).dimension == 2
    with pytest.raises(UserError, match=r"a vector of zeros\. Ingest the pages again"):
        packed(tmp_path, [good, good * 0])


@given(
    st.lists(st.sampled_from([-np.inf, 0.5, 1.0, 2.0, 3.0]), max_size=30),
    st.integers(1, 12),
    st.sets(st.integers(0, 29), max_size=5),
)
def test_the_best_are_those_of_a_full_sort(scores, top_k, without):
    without = [k for k in without if k < len(scores)]
    hits = [(-s, k) for k, s in enumerate(scores) if s > -np.inf and k not in without]
    expected = [(k, -s) for s, k in sorted(hits)][:top_k]
    assert best(np.array(scores, np.float32), top_k, without) == expected


@pytest.mark.parametrize("pages", [63, 64, 640, 641, 5000])
@pytest.mark.parametrize("levels", [3, 1000])  # many or few are equal
@pytest.mark.parametrize("share", [0.002, 0.9])  # of pages that are hits
def test_the_best_of_many_pages_are_those_of_a_full_sort(pages, levels, share):
    draw = np.random.default_rng(pages)
    scores = draw.integers(0, levels, pages).astype(np.float32)
    scores[draw.random(pages) > share] = -np.inf
    scores[draw.random(pages) < 0.01] = np.nan  # never a hit
    hits = sorted((-s, k) for k, s in enumerate(scores.tolist()) if s > -np.inf)
    for top_k in (1, 9, 10, 11, 80, pages + 1):
        assert best(scores, top_k) == [(k, -s) for s, k in hits][:top_k]


class Part:
    def __init__(self, answers):
        self.answers = answers

    def read(self, query):
        return query

    def scores(self, queries, hits):
        return [self.answers[query] for query in queries]


def test_a_fused_query_fails_with_any_of_its_parts():
    error = SampleError("upstream", "away")
    good = np.array([1.0, -np.inf, 3.0], np.float32)
    fused = HybridSearcher([Part({"a": good, "b": good}), Part({"a": good, "b": error})])
    fused_scores, failed = fused.scores([fused.read("a"), fused.read("b")], [10, 10])
    assert failed is error
    np.testing.assert_allclose(fused_scores, [2 / 62, -np.inf, 2 / 61], rtol=1e-6)


def test_kept_vectors_that_are_damaged_are_asked_for_again(tmp_path):
    cache = VectorCache(tmp_path, ("model", 1))
    cache.put("ab", np.ones((2, 3), np.float32))
    assert cache.get("ab").shape == (2, 3) and cache.get("cd") is None
    assert VectorCache(tmp_path, ("model", 2)).get("ab") is None
    cache.put("ef", np.array([[1, 0], [0, 0]], np.float32))
    assert cache.get("ef") is None
    (path,) = tmp_path.rglob("ab.npy")
    path.write_bytes(path.read_bytes()[:-4])
    assert cache.get("ab") is None
    np.save(path, np.array([{"a": 1}], dtype=object))  # pickled: never read
    assert cache.get("ab") is None
