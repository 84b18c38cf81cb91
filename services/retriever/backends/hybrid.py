"""Several back ends as one: reciprocal rank fusion of their rankings."""

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
    """A page's score: the sum of 1 / (K + its rank) over the back ends that have it as a hit.

    A query for which one of them fails fails: half a ranking would be another one.
    """

    name = NAME

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def check(self) -> None:
        """Of each part."""
        for part in self._parts:
            part.check()

    def read(self, query: str) -> Any:
        """What each part reads of it."""
        return [part.read(query) for part in self._parts]

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """Of each query."""
        by_part = [
            part.scores([query[k] for query in queries]) for k, part in enumerate(self._parts)
        ]
        return [_fused(found) for found in zip(*by_part, strict=True)]


def _fused(found: Sequence[Scores | SampleError]) -> Scores | SampleError:
    total: Any = 0.0
    for scores in found:
        if isinstance(scores, SampleError):
            return scores
        total = total + _shares(scores)
    total[total == 0.0] = -np.inf
    return np.asarray(total, dtype=np.float32)


def _shares(scores: Scores) -> np.ndarray[Any, np.dtype[np.float64]]:
    """1 / (K + rank) of each page, 0 of what is no hit. Equal scores have one rank, the best of
    them: their order would be that of the index."""
    ordered = np.sort(-scores)
    ranks = np.searchsorted(ordered, -scores, side="left") + 1
    return np.where(scores > -np.inf, 1.0 / (K + ranks), 0.0)
