"""Vectors of pages: cached while an index is built, packed into its state, searched exactly.

A page has any number of vectors: one for each patch of its image (late interaction), one for each
chunk of its text (dense), or none, and then it is no hit. They are stored without padding, because
a padding vector could be the best match.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from scorekit.errors import UserError
from scorekit.files import with_path_in_error, write_atomic
from services.retriever.backends.ranking import Scores

#: The start of a .npy file of version 1.0, and the length of its header with it.
_NPY_MAGIC, _HEADER_BYTES = b"\x93NUMPY\x01\x00", 128
Vectors = np.ndarray[Any, np.dtype[np.float32]]
#: Number of similarities computed at once: they fit into a core's caches.
_BLOCK_SIMILARITIES = 256 * 1024
#: Number of vectors of candidates that are multiplied at once.
_BLOCK_VECTORS = 4096
#: Up to so many query vectors, BLAS is faster if the vectors of the pages come first: else it
#: rearranges all of these for a few products each.
_FEW_QUERY_VECTORS = 64
#: Largest relative difference of two servers' vectors of one text if they have the same model.
#: bfloat16 and different batches cause about 1 %.
_MAX_RELATIVE_DIFFERENCE = 0.05


class VectorCache:
    """Cache of computed vectors, so that a run that was killed does not compute them again.

    settings: everything that the vectors depend on except the content.
    """

    def __init__(self, folder: Path, settings: Sequence[object]) -> None:
        key = "\0".join(map(str, settings))
        self._folder = folder / hashlib.sha256(key.encode()).hexdigest()[:32]

    def get(self, content: str) -> Vectors | None:
        """Return the vectors [n, D] of a content's digest, or None."""
        try:
            array = np.load(self._path(content), allow_pickle=False)
            is_vectors = array.ndim == 2 and array.dtype.kind == "f"
            return np.ascontiguousarray(checked_vectors(array)) if is_vectors else None
        except (OSError, ValueError, EOFError):
            return None

    def put(self, content: str, vectors: Vectors) -> None:
        """Store the vectors of a content's digest."""
        out = io.BytesIO()
        np.save(out, vectors, allow_pickle=False)
        write_atomic(self._path(content), out.getvalue())

    def _path(self, content: str) -> Path:
        return self._folder / content[:2] / f"{content}.npy"


def checked_vectors(array: Any, dimension: int | None = None) -> Vectors:
    """Return float32 [n, D], finite and without rows of zeros. Raises ValueError otherwise."""
    try:
        vectors = np.asarray(array, dtype=np.float32)
    except (ValueError, TypeError):
        raise ValueError("rows of different lengths, or no numbers") from None
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise ValueError(f"an array of {vectors.ndim} dimensions")
    if dimension is not None and vectors.shape[1] != dimension:
        raise ValueError(f"vectors of {vectors.shape[1]} numbers, others have {dimension}")
    if not np.isfinite(vectors).all():
        raise ValueError("a number that is not finite")
    if not vectors.any(axis=1).all():
        # Its product with any vector is 0, which would beat all negative products.
        raise ValueError("a vector of zeros (padding? then leave it out)")
    return vectors


def of_length_one(vectors: Vectors) -> Vectors:
    """Return the vectors, checked by `checked_vectors`, scaled to length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), dtype=np.float32)


def pack(vectors: Iterable[Vectors], folder: Path) -> int:
    """Write the vectors of all pages in order; return their dimension.

    Raises UserError if no page has vectors, or if their dimensions differ."""
    dimensions: set[int] = set()
    counts = []
    path = folder / "values.npy"
    # Written page by page: late-interaction vectors take gigabytes.
    with with_path_in_error(path), path.open("wb") as file:
        _write_header(file, 0, 1)
        for page_vectors in vectors:
            counts.append(len(page_vectors))
            if len(page_vectors):
                dimensions.add(page_vectors.shape[1])
                file.write(np.ascontiguousarray(page_vectors, dtype=np.float32).data)
        if len(dimensions) != 1:
            problem = f"of {len(dimensions)} dimensions" if dimensions else "for no page"
            raise UserError(f"vectors {problem}: nothing could be searched")
        (dimension,) = dimensions
        file.seek(0)
        _write_header(file, sum(counts), dimension)
    starts = np.cumsum([0, *counts], dtype=np.int64)
    np.save(folder / "starts.npy", starts, allow_pickle=False)
    return dimension


def _write_header(file: IO[bytes], rows: int, columns: int) -> None:
    """Write the header of a .npy file. Its length is the same for all shapes."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    length = _HEADER_BYTES - len(_NPY_MAGIC) - 2
    file.write(_NPY_MAGIC + length.to_bytes(2, "little") + header.ljust(length - 1).encode())
    file.write(b"\n")


class PackedVectors:
    """The vectors that `pack` has written, in memory.

    is_mapped: they stay on the disk.
    """

    def __init__(self, folder: Path, *, is_mapped: bool = False) -> None:
        self._values: Vectors = np.load(
            folder / "values.npy", mmap_mode="r" if is_mapped else None, allow_pickle=False
        )
        # An older version did not check the servers' vectors. It wrote no index that is mapped.
        if not is_mapped and not self._values.any(axis=1).all():
            raise UserError(f"{folder}: a vector of zeros. Ingest the pages again.")
        starts: Any = np.load(folder / "starts.npy", allow_pickle=False)
        self.pages = len(starts) - 1
        self._page_starts = starts
        self._owners = np.flatnonzero(np.diff(starts))  # pages with vectors
        self._starts = starts[:-1][self._owners]
        self._ends = starts[1:][self._owners]
        self.dimension = int(self._values.shape[1])

    def max_sim(self, queries: Sequence[Vectors]) -> list[Scores]:
        """Return the exact MaxSim scores of each query [q, D] and each page.

        MaxSim is the sum over the query's vectors of the largest dot product with a vector of the
        page (Khattab & Zaharia 2020, ColBERT, eq. 3); -inf for a page without vectors."""
        query_vectors = np.concatenate(queries)
        query_starts = np.cumsum([0, *(len(query) for query in queries)])[:-1]
        scores = np.full((len(queries), self.pages), -np.inf, dtype=np.float32)
        max_vectors = max(1, _BLOCK_SIMILARITIES // len(query_vectors))
        first = 0
        while first < len(self._owners):
            start = self._starts[first]
            last = max(
                first + 1, int(np.searchsorted(self._ends, start + max_vectors, side="right"))
            )
            best = _best_products(
                query_vectors,
                self._values[start : self._ends[last - 1]],
                self._starts[first:last] - start,
            )
            scores[:, self._owners[first:last]] = np.add.reduceat(best, query_starts, axis=0)
            first = last
        return list(scores)

    def max_sim_of(self, query: Vectors, pages: np.ndarray[Any, np.dtype[np.int64]]) -> Scores:
        """Return the exact MaxSim scores of one query and these pages; -inf for all others.

        Each page must have vectors."""
        scores = np.full(self.pages, -np.inf, dtype=np.float32)
        starts, ends = self._page_starts[pages], self._page_starts[pages + 1]
        totals = np.cumsum(ends - starts)
        first = done = 0
        # Pages together: with several threads, BLAS waits for all of them after each product.
        while first < len(pages):
            last = max(first + 1, int(np.searchsorted(totals, done + _BLOCK_VECTORS, side="right")))
            block = slice(first, last)
            vectors = np.concatenate(
                [self._values[s:e] for s, e in zip(starts[block], ends[block], strict=True)]
            )
            offsets = totals[block] - (ends - starts)[block] - done
            scores[pages[block]] = _best_products(query, vectors, offsets).sum(axis=0)
            first, done = last, totals[last - 1]
        return scores


def _best_products(query: Vectors, vectors: Vectors, starts: Any) -> Vectors:
    """Return the largest product [q, P] of each query vector [q, D] with those of each page.

    vectors [n, D]: of P pages, one after another. starts [P]: index of each page's first one.
    """
    if len(query) > _FEW_QUERY_VECTORS:
        return np.maximum.reduceat(query @ vectors.T, starts, axis=1)
    return np.maximum.reduceat(vectors @ query.T, starts, axis=0).T


def check_same_model(probe_path: Path, probe: Vectors, server: str) -> None:
    """Raise UserError unless the probe's vectors come from the model that built the index."""
    stored = np.load(probe_path, allow_pickle=False)
    if stored.shape == probe.shape:
        distances = np.linalg.norm(stored - probe, axis=-1)
        if (
            distances
            <= _MAX_RELATIVE_DIFFERENCE * np.maximum(np.linalg.norm(stored, axis=-1), 1e-6)
        ).all():
            return
    raise UserError(
        f"{server}: the server's model is not the one that built the index. Name the server "
        "of that model, or ingest again"
    )
