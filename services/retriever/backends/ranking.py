"""Select the best pages by score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: A score for each page, float32 [N], higher is better; -inf for a page that is no hit.
Scores = np.ndarray[Any, np.dtype[np.float32]]
_BLOCK = 64
#: Index of a page and its score, the best first.
Ranking = list[tuple[int, float]]


def best(scores: Scores, max_hits: int, without: Sequence[int] = ()) -> Ranking:
    """Return up to `max_hits` best pages; for equal scores the earlier page comes first.

    without: indexes of pages to leave out."""
    if without:
        scores = scores.copy()
        scores[list(without)] = -np.inf
    floor = _floor(scores, max_hits)
    hits = np.flatnonzero(scores >= floor if floor > -np.inf else scores > -np.inf)
    if len(hits) > max_hits:
        min_score = np.partition(scores[hits], len(hits) - max_hits)[len(hits) - max_hits]
        hits = hits[scores[hits] >= min_score]
    order = hits[np.lexsort((hits, -scores[hits]))][:max_hits]
    return [(int(index), float(scores[index])) for index in order]


def _floor(scores: Scores, max_hits: int) -> float:
    """Return a score that at least `max_hits` pages reach, so that few pages must be sorted.

    At least `max_hits` blocks have a page with this score. Returns -inf for too few blocks."""
    blocks = len(scores) // _BLOCK
    if blocks < max_hits:
        return -np.inf
    by_block = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK)
    maxima = np.fmax.reduce(by_block, axis=1, initial=-np.inf)  # a NaN is no maximum
    return float(np.partition(maxima, blocks - max_hits)[blocks - max_hits])
