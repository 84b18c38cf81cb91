"""Scores every page with the plain formula, in float64: what a retriever must return."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

Numbers = np.ndarray


class PlainBm25:
    """BM25 as Lucene has it (Kamphuis et al. 2020, table 1): for each word of the query
    `log(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b * length / mean length))`."""

    def __init__(self, texts: Sequence[Sequence[str]], k1: float = 1.5, b: float = 0.75) -> None:
        self._count = len(texts)
        lengths = np.array([len(text) for text in texts], dtype=np.float64)
        self._norm = k1 * (1 - b + b * lengths / lengths.mean())
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for page, text in enumerate(texts):
            for word, times in Counter(text).items():
                self._postings[word].append((page, times))

    def scores(self, words: Sequence[str]) -> Numbers:
        """Return the scores [N]; 0 for a page that has none of the words."""
        page_scores = np.zeros(self._count)
        for word in words:
            postings = self._postings.get(word, [])
            idf = math.log(1 + (self._count - len(postings) + 0.5) / (len(postings) + 0.5))
            for page, times in postings:
                page_scores[page] += idf * times / (times + self._norm[page])
        return page_scores


def max_sim(query: Numbers, pages: Sequence[Numbers]) -> Numbers:
    """Return [N], the late-interaction score of each page.

    It is the sum, over the query's vectors [Q, D], of the largest product with any vector of the
    page [P, D].
    """
    wide = query.astype(np.float64)
    return np.array([(page.astype(np.float64) @ wide.T).max(axis=0).sum() for page in pages])


def recall(retrieved: Sequence[int], scores: Numbers, top_k: int) -> float:
    """Return the share of the `top_k` best pages that were retrieved.

    A page whose score equals that of the last one, except for rounding, is as good.
    """
    num_relevant = min(top_k, int((scores > -np.inf).sum()))
    if num_relevant == 0:
        return 1.0 if not retrieved else 0.0
    last = np.sort(scores)[-num_relevant]
    good = {page for page in retrieved if scores[page] >= last - 1e-4 * abs(last)}
    return len(good) / num_relevant
