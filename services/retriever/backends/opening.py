"""Open the backend that searches an index: one, or several by reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from scorekit.errors import SampleError, UserError
from services.retriever.backends.bm25 import Bm25Searcher
from services.retriever.backends.dense import DenseSearcher
from services.retriever.backends.late import LateSearcher
from services.retriever.backends.ranking import Scores

HYBRID = "hybrid"
#: As Cormack, Clarke & Büttcher (2009) set it.
K = 60


class Searcher(Protocol):
    """Scores all pages of an index.

    name: the backend's name.

    `read` runs in one thread, `scores` in others: in several at once if it calls servers.
    """

    name: str

    def check(self) -> None:
        """Raise UserError if the index cannot be searched, for example with another model."""
        ...

    def read(self, query: str) -> Any:
        """Return what `scores` needs from a query."""
        ...

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the scores of each query, in the form that `read` returns.

        hits: the number of pages of each query that must have a score, if so many are hits."""
        ...


class Servers(NamedTuple):
    """Addresses of the models that embed queries.

    model: its name on the server; None: the one in the index. key: of the pooling server."""

    embeddings_url: str | None = None
    embeddings_model: str | None = None
    late_url: str | None = None
    late_model: str | None = None
    late_key: str | None = None


def open_searcher(
    name: str | None, state: Path, backends: Mapping[str, dict[str, Any]], servers: Servers
) -> tuple[str, Searcher]:
    """Return (name, searcher) of the named backend; None: the index's only one, or hybrid.

    backends: settings of the index's backends, by name. Raises UserError."""
    name = name or (next(iter(backends)) if len(backends) == 1 else HYBRID)
    if name == HYBRID and len(backends) > 1:
        return name, HybridSearcher(
            [_open(part, state, backends[part], servers) for part in backends]
        )
    if name not in backends:
        available = ", ".join(backends)
        required = "at least two" if name == HYBRID else "it"
        raise UserError(
            f"--backend {name}: the index has {available}. Run ingest with {required}, too"
        )
    return name, _open(name, state, backends[name], servers)


def _open(name: str, state: Path, settings: dict[str, Any], servers: Servers) -> Searcher:
    folder = state / name
    match name:
        case "bm25":
            return Bm25Searcher(folder, settings)
        case "dense":
            return DenseSearcher(folder, settings, servers.embeddings_url, servers.embeddings_model)
        case "late":
            return LateSearcher(
                folder, settings, servers.late_url, servers.late_model, servers.late_key
            )
    raise UserError(f"the index has a backend {name!r}, which this version does not support")


class HybridSearcher:
    """Scores a page with the sum of 1 / (K + its rank) over the backends with this hit.

    A query fails if one backend fails, because a partial sum would give another ranking.
    """

    name = HYBRID

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def check(self) -> None:
        """Check every backend."""
        for part in self._parts:
            part.check()

    def read(self, query: str) -> Any:
        """Return what each backend reads from the query."""
        return [part.read(query) for part in self._parts]

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the scores of each query."""
        by_part = [
            part.scores([query[k] for query in queries], hits) for k, part in enumerate(self._parts)
        ]
        return [_fuse(part_scores) for part_scores in zip(*by_part, strict=True)]


def _fuse(part_scores: Sequence[Scores | SampleError]) -> Scores | SampleError:
    total: Any = 0.0
    for scores in part_scores:
        if isinstance(scores, SampleError):
            return scores
        total = total + _shares(scores)
    total[total == 0.0] = -np.inf
    return np.asarray(total, dtype=np.float32)


def _shares(scores: Scores) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return 1 / (K + rank) of each page, 0 for a page that is no hit.

    Pages with equal scores share the best rank, so that the order of the index does not matter."""
    ordered = np.sort(-scores)
    ranks = np.searchsorted(ordered, -scores, side="left") + 1
    return np.where(scores > -np.inf, 1.0 / (K + ranks), 0.0)
