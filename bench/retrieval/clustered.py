"""Token vectors whose similarities resemble those of a late-interaction model.

Each document draws 60 of 4,096 directions, the common ones more often, and each of its ten pages 25
of these. 55 % of a page's vectors lie around them. The others lie close to 4 of 32 directions that
stand for empty paper. All share a direction, as the vectors of trained encoders do. A query has 12
vectors near those of one page, and 8 that are near fixed directions, as padded queries have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

DIMENSION = 128
_DIRECTIONS, _OF_DOCUMENT, _OF_PAGE, _PAPER = 4096, 60, 25, 32
_PAGES_OF_DOCUMENT = 10

Vectors = np.ndarray[Any, np.dtype[np.float32]]


def of_length_one(vectors: Any) -> Vectors:
    """Return float32 vectors of length 1 each."""
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


class ClusteredPages:
    """Draws the vectors of `count` pages, by a seed for each page.

    patches: vectors of a page, on average."""

    def __init__(self, count: int, patches: int = 700) -> None:
        draw = np.random.default_rng(0)
        self.count, self._patches = count, patches
        # Few dimensions vary most, as in the vectors of trained encoders.
        scale = (1.0 + np.arange(DIMENSION)) ** -0.35
        self._scale = (scale / np.linalg.norm(scale)).astype(np.float32)
        self._shared = of_length_one(draw.standard_normal(DIMENSION))
        self._directions = of_length_one(draw.standard_normal((_DIRECTIONS, DIMENSION)) * scale)
        self._paper = of_length_one(draw.standard_normal((_PAPER, DIMENSION)) * scale)
        self._padding = of_length_one(draw.standard_normal((8, DIMENSION)) + 0.5 * self._shared)
        shares = (1.0 + np.arange(_DIRECTIONS)) ** -0.8
        self._shares = shares / shares.sum()

    def __iter__(self) -> Iterator[Vectors]:
        """Yield the vectors of each page, [n, D]."""
        return (self.page(number) for number in range(self.count))

    def page(self, number: int) -> Vectors:
        """Return the vectors of a page, [n, D]; the first 55 % are its content."""
        draw = np.random.default_rng((2, number))
        chosen = draw.choice(self._document(number // _PAGES_OF_DOCUMENT), _OF_PAGE, replace=False)
        shares = (1.0 + np.arange(_OF_PAGE)) ** -0.7
        length = int(self._patches * draw.uniform(0.85, 1.15))
        content = _content(length)
        near = self._directions[draw.choice(chosen, content, p=shares / shares.sum())]
        paper = draw.choice(draw.choice(_PAPER, 4, replace=False), length - content)
        noise = draw.standard_normal((length, DIMENSION), dtype=np.float32) * self._scale
        noise[:content] *= 0.8
        noise[content:] *= 0.35
        return of_length_one(
            np.concatenate([near, self._paper[paper]]) + noise + 0.45 * self._shared
        )

    def query(self, number: int) -> Vectors:
        """Return the vectors of a query, [20, D]."""
        draw = np.random.default_rng((3, number))
        page = self.page(int(draw.integers(self.count)))
        near = page[draw.choice(_content(len(page)), 12, replace=False)]
        noise = draw.standard_normal((20, DIMENSION), dtype=np.float32) * self._scale
        noise[12:] *= 0.3
        return of_length_one(np.concatenate([near, self._padding]) + noise)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - it lives as long as the process
    def _document(self, number: int) -> Any:
        draw = np.random.default_rng((1, number))
        return draw.choice(_DIRECTIONS, _OF_DOCUMENT, replace=False, p=self._shares)


def _content(length: int) -> int:
    return int(0.55 * length)
