"""Vectors of pages: kept one by one while an index is made, packed in its state, searched exactly.

A page has any number of vectors: one for each patch of its picture (late interaction), one for each
piece of its text (dense), or none, and then it is no hit. They stand one behind another without
padding, so there is none that could win.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scorekit.errors import UserError
from scorekit.files import write_atomic
from services.retriever.backends.ranking import Scores

#: Seconds that a query may wait for the server of its vectors, with second tries.
SERVER_DEADLINE_S = 30.0

Vectors = np.ndarray[Any, np.dtype[np.float32]]
#: Similarities that are computed at once: they stay in the caches of a core.
_AT_ONCE = 256 * 1024
#: Difference of two servers' vectors of one text, as a part of their length, over which they are of
#: two models. bfloat16 and other batches make it 1 %.
_SAME = 0.05


class KeptVectors:
    """Vectors that were paid for, by what they depend on: a run that was killed asks for none of
    them again.

    settings: of the model, and of what it is asked.
    """

    def __init__(self, folder: Path, settings: Sequence[object]) -> None:
        told = "\0".join(map(str, settings))
        self._folder = folder / hashlib.sha256(told.encode()).hexdigest()[:32]

    def get(self, content: str) -> Vectors | None:
        """[n, D] of a content's digest, or None."""
        try:
            return _floats(np.load(self._path(content), allow_pickle=False))
        except (OSError, ValueError, EOFError):
            return None

    def put(self, content: str, vectors: Vectors) -> None:
        """Keep them."""
        out = io.BytesIO()
        np.save(out, vectors, allow_pickle=False)
        write_atomic(self._path(content), out.getvalue())

    def _path(self, content: str) -> Path:
        return self._folder / content[:2] / f"{content}.npy"


def _floats(found: Any) -> Vectors:
    if found.ndim != 2 or found.dtype.kind != "f":
        raise ValueError("no vectors")
    return np.ascontiguousarray(checked_vectors(found))


def checked_vectors(found: Any, dimension: int | None = None) -> Vectors:
    """Float32 [n, D], finite, no row of zeros. Raises ValueError, in words, for anything else."""
    try:
        vectors = np.asarray(found, dtype=np.float32)
    except (ValueError, TypeError):
        raise ValueError("rows of different lengths, or no numbers") from None
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise ValueError(f"an array of {vectors.ndim} dimensions")
    if dimension is not None and vectors.shape[1] != dimension:
        raise ValueError(f"vectors of {vectors.shape[1]} numbers, others have {dimension}")
    if not np.isfinite(vectors).all():
        raise ValueError("a number that is not finite")
    if not vectors.any(axis=1).all():
        # Its product with any vector is 0: it would win over all that is less than nothing.
        raise ValueError("a vector of zeros (padding? then leave it out)")
    return vectors


def of_length_one(vectors: Vectors) -> Vectors:
    """The same directions, of vectors that `checked_vectors` has let through."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), dtype=np.float32)


def pack(vectors: Sequence[Vectors], folder: Path) -> int:
    """Write the vectors of all pages, in their order; how many numbers each has. Raises UserError
    where no page has any, or they are of several dimensions."""
    dimensions = {one.shape[1] for one in vectors if len(one)}
    if len(dimensions) != 1:
        what = f"of {len(dimensions)} dimensions" if dimensions else "for no page"
        raise UserError(f"vectors {what}: nothing could be searched")
    (dimension,) = dimensions
    starts = np.cumsum([0, *(len(one) for one in vectors)], dtype=np.int64)
    np.save(folder / "starts.npy", starts, allow_pickle=False)
    # Not in memory as a whole: of late interaction they are gigabytes.
    shape = (int(starts[-1]), dimension)
    path = folder / "values.npy"
    values: Any = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    for one, start in zip(vectors, starts[:-1], strict=True):
        values[start : start + len(one)] = one
    values.flush()
    return dimension


class PackedVectors:
    """What `pack` has written, in memory."""

    def __init__(self, folder: Path) -> None:
        self._values: Vectors = np.load(folder / "values.npy", allow_pickle=False)
        if not self._values.any(axis=1).all():  # an older version packed what servers gave it
            raise UserError(f"{folder}: a vector of zeros. Ingest the pages anew.")
        starts = np.load(folder / "starts.npy", allow_pickle=False)
        self._pages = len(starts) - 1
        self._owners = np.flatnonzero(np.diff(starts))  # pages with vectors
        self._starts = starts[:-1][self._owners]
        self._ends = starts[1:][self._owners]
        self.dimension = int(self._values.shape[1])

    def max_sim(self, queries: Sequence[Vectors]) -> list[Scores]:
        """For each query [q, D] and each page: the sum, over the query's vectors, of the largest
        dot product with any of the page's (Khattab & Zaharia 2020, ColBERT, eq. 3). Exact; -inf for
        a page without vectors."""
        together = np.concatenate(queries)
        begins = np.cumsum([0, *(len(query) for query in queries)])[:-1]
        scores = np.full((len(queries), self._pages), -np.inf, dtype=np.float32)
        most = max(1, _AT_ONCE // len(together))
        first = 0
        while first < len(self._owners):
            start = self._starts[first]
            last = max(first + 1, int(np.searchsorted(self._ends, start + most, side="right")))
            similar = together @ self._values[start : self._ends[last - 1]].T
            best = np.maximum.reduceat(similar, self._starts[first:last] - start, axis=1)
            scores[:, self._owners[first:last]] = np.add.reduceat(best, begins, axis=0)
            first = last
        return list(scores)


def check_same_model(kept: Path, found: Vectors, server: str) -> None:
    """Raises UserError unless a probe's vectors are those of the model that made the index."""
    here = np.load(kept, allow_pickle=False)
    if here.shape == found.shape:
        apart = np.linalg.norm(here - found, axis=-1)
        if (apart <= _SAME * np.maximum(np.linalg.norm(here, axis=-1), 1e-6)).all():
            return
    raise UserError(
        f"{server}: a plain text's vector is not the one of the model that made the index: name "
        "the server of that model, or ingest anew"
    )
