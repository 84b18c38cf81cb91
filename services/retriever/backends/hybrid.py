"""Combine several backends by reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scorekit.errors import SampleError
from services.retriever.backends.ranking import Scores

NAME = "hybrid"
#: As Cormack, Clarke & Büttcher (2009) set it.
K = 60


class HybridSearcher:
    """Scores a page with the sum of 1 / (K + its rank) over the backends with this hit.

    A query fails if one backend fails, because a partial sum would give another ranking.
    """

    name = NAME

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
        return [_fused(part_scores) for part_scores in zip(*by_part, strict=True)]


def _fused(part_scores: Sequence[Scores | SampleError]) -> Scores | SampleError:
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
