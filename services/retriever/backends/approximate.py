"""Approximate late interaction: candidates from an index of all vectors, then their exact MaxSim.

The index (faiss) keeps the vectors of all pages in lists around k-means centroids, with 4 bits for
each number. Each vector of a query looks up its nearest vectors in the nearest lists, and the pages
with the highest sums are the candidates, as ColBERT retrieves end to end (Khattab & Zaharia 2020).
It departs from the paper in ranking them: a vector that did not find a page counts with the lowest
similarity that it found, as in XTR (Lee et al. 2023), and only the best pages are scored exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from scorekit.errors import UserError
from scorekit.files import with_path_in_error
from services.retriever.backends.ranking import Scores
from services.retriever.backends.vectors import PackedVectors, Vectors

#: Lists searched, vectors looked up, and pages scored exactly, at least.
_PROBES, _NEIGHBORS, _CANDIDATES = 32, 4096, 400
#: And at least one of so many lists, vectors and pages: with fixed numbers, recall@5 was 0.99 of
#: 10,000 pages and 0.88 of 30,000 (bench/retrieval/size.py).
_LISTS_A_PROBE, _VECTORS_A_NEIGHBOR, _PAGES_A_CANDIDATE = 60, 256, 25
#: A query that asks for many hits looks up and scores this many times as many.
_TIMES_HITS = 4
_FILE = "candidates.faiss"
_TRAINING_VECTORS = 40  # for each list
_ITERATIONS = 5
_BLOCK_VECTORS = 256 * 1024


def build_candidates(folder: Path) -> dict[str, Any]:
    """Write the index of the vectors that `pack` has written; return its settings."""
    import faiss

    values = np.load(folder / "values.npy", mmap_mode="r", allow_pickle=False)
    starts = np.load(folder / "starts.npy", allow_pickle=False)
    count, dimension = values.shape
    lists = min(count, int(2 * count**0.5))
    rows = np.random.default_rng(0).choice(
        count, min(count, _TRAINING_VECTORS * lists), replace=False
    )
    sample = values[np.sort(rows)]
    kmeans = faiss.Kmeans(
        dimension,
        lists,
        niter=_ITERATIONS,
        spherical=True,
        seed=0,
        min_points_per_centroid=1,
        max_points_per_centroid=_TRAINING_VECTORS,
    )
    kmeans.train(sample)
    quantizer = faiss.IndexHNSWFlat(dimension, 32, faiss.METRIC_INNER_PRODUCT)
    quantizer.hnsw.efSearch = 16  # enough for the one list of each vector
    centroids: Any = kmeans.centroids  # faiss declares that they may be None: before `train`
    for centroid in centroids:  # one by one: threads would link them in another order
        quantizer.add(centroid[None])
    index = faiss.IndexIVFScalarQuantizer(
        quantizer,
        dimension,
        lists,
        faiss.ScalarQuantizer.QT_4bit,
        faiss.METRIC_INNER_PRODUCT,
    )
    index.train(sample)
    pages = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    for start in range(0, count, _BLOCK_VECTORS):
        block = slice(start, start + _BLOCK_VECTORS)
        index.add_with_ids(np.ascontiguousarray(values[block]), pages[block])
    settings = search_settings(lists, count, len(starts) - 1)
    quantizer.hnsw.efSearch = 2 * settings["probes"]
    with with_path_in_error(folder / _FILE):
        faiss.write_index(index, str(folder / _FILE))
    return settings


def search_settings(lists: int, vectors: int, pages: int) -> dict[str, Any]:
    """Return how much of an index of so many lists, vectors and pages a query searches."""
    return {
        "lists": lists,
        "probes": max(_PROBES, lists // _LISTS_A_PROBE),
        "neighbors": max(_NEIGHBORS, vectors // _VECTORS_A_NEIGHBOR),
        "candidates": max(_CANDIDATES, pages // _PAGES_A_CANDIDATE),
        "times_hits": _TIMES_HITS,
    }


class Candidates:
    """Finds the candidates of queries in the index of `build_candidates`, and scores them.

    settings: those that `build_candidates` has returned.
    vectors: those of the same folder.
    Raises UserError if this version of faiss cannot read the index."""

    def __init__(self, folder: Path, settings: dict[str, Any], vectors: PackedVectors) -> None:
        import faiss

        self._settings, self._vectors = settings, vectors
        path = folder / _FILE
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
        try:
            self._index = cast(Any, faiss.read_index(str(path), flags))
        except RuntimeError:
            raise UserError(
                f"{path}: missing, or not readable by faiss {faiss.__version__}. Ingest again"
            ) from None
        self._index.nprobe = settings["probes"]

    def max_sim(self, query: Vectors, hits: int) -> Scores:
        """Return the MaxSim scores of a query's candidates; -inf for all other pages.

        Every page is scored if the candidates would be fewer than `hits`, or half of all pages."""
        max_pages = max(self._settings["candidates"], self._settings["times_hits"] * hits)
        if 2 * max_pages < self._vectors.pages:
            candidates = self._best_pages(query, max_pages)
            if len(candidates) >= hits:
                return self._vectors.max_sim_of(query, candidates)
        (scores,) = self._vectors.max_sim([query])
        return scores

    def _best_pages(self, query: Vectors, max_pages: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return up to `max_pages` pages with the highest approximate MaxSim."""
        neighbors = max(self._settings["neighbors"], max_pages)
        similar, pages = self._index.search(query, neighbors)  # [q, neighbors], the best first
        is_hit = pages >= 0  # -1: the lists had fewer vectors
        lowest = np.where(is_hit, similar, np.inf).min(axis=1, keepdims=True)
        lowest[np.isinf(lowest)] = 0.0
        scored, columns = np.unique(pages[is_hit], return_inverse=True)
        totals = np.broadcast_to(lowest, (len(query), len(scored))).copy()
        rows = np.broadcast_to(np.arange(len(query))[:, None], pages.shape)[is_hit]
        # A page stands there once for each of its vectors.
        np.maximum.at(totals.ravel(), rows * len(scored) + columns, similar[is_hit])
        sums = totals.sum(axis=0)
        if len(scored) > max_pages:
            scored = scored[np.argpartition(sums, len(sums) - max_pages)[len(sums) - max_pages :]]
        return np.sort(scored)
