"""From the scores of all pages to the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: A score for each page, float32 [N], higher is better; -inf for one that is no hit at all.
Scores = np.ndarray[Any, np.dtype[np.float32]]
_BLOCK = 64
#: Index of a page and its score, the best first.
Ranking = list[tuple[int, float]]


def best(scores: Scores, most: int, without: Sequence[int] = ()) -> Ranking:
    """The `most` best pages, fewer where there are not so many; of equal ones the earlier page of
    the index first. without: indexes of pages that are left out."""
    if without:
        scores = scores.copy()
        scores[list(without)] = -np.inf
    floor = _floor(scores, most)
    hits = np.flatnonzero(scores >= floor if floor > -np.inf else scores > -np.inf)
    if len(hits) > most:
        least = np.partition(scores[hits], len(hits) - most)[len(hits) - most]
        hits = hits[scores[hits] >= least]
    order = hits[np.lexsort((hits, -scores[hits]))][:most]
    return [(int(index), float(scores[index])) for index in order]


def _floor(scores: Scores, most: int) -> float:
    """What at least `most` pages reach, so that few are left to be sorted: as many blocks of pages
    have a page that does. -inf where there are too few blocks."""
    blocks = len(scores) // _BLOCK
    if blocks < most:
        return -np.inf
    whole = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK)
    maxima = np.fmax.reduce(whole, axis=1, initial=-np.inf)  # a NaN is no maximum
    return float(np.partition(maxima, blocks - most)[blocks - most])
