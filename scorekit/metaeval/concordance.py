"""Count the pairs of translations that two scores order alike, under many weights (Kendall).

A translation of weight w counts as w copies of it. Copies are not ordered among themselves, and
translations i and j make `w_i * w_j` pairs. The number of pairs grows with the square of the number
n of translations; time per draw, and memory, grow with `n * log(levels)`: the levels are the
distinct values of the score that has fewer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any

#: Size of a block of weights (draws * translations), 8 bytes each.
_BLOCK = 1 << 17


class _Level(NamedTuple):
    """One bit of the split score's ranks. Translations that share all higher bits are a group:
    those with the bit unset have lower scores than those with it set.

    order: translations by group, and by the other score in it. is_low: bit unset, in that order.
    high: positions where it is set. edges: for each of `high`, the positions where its group
    begins, where the other score's equal values begin and end, and where the group ends.
    """

    order: Array
    is_low: Array
    high: Array
    edges: tuple[Array, Array, Array, Array]


class Concordance:
    """Pair counts of two scores. human, metric: (n,), no NaN."""

    def __init__(self, human: Array, metric: Array) -> None:
        self._ranks = [np.unique(x, return_inverse=True)[1].reshape(-1) for x in (human, metric)]
        split, other = sorted(self._ranks, key=lambda ranks: int(ranks.max(initial=0)))
        bits = int(split.max(initial=0)).bit_length()
        self._levels = [_level(split, other, bit) for bit in range(bits)]

    def sums(self, weights: Array, group_of: Array) -> tuple[Array, Array, Array]:
        """Return sums over ordered pairs, (draws,) each; integers below 2**53 are exact.

        The sum of the products of both signs, and the number of pairs that are not tied in the
        human scores, and in the metric's.

        weights: (draws, groups). group_of: (n,), the group of each translation.
        """
        step = max(1, _BLOCK // max(1, len(group_of)))
        blocks = [weights[k : k + step][:, group_of] for k in range(0, len(weights), step)]
        parts = [(self._agreeing(w), *(_untied(w, ranks) for ranks in self._ranks)) for w in blocks]
        s, a, b = (np.concatenate(column) for column in zip(*parts, strict=True))
        return s, a, b

    def _agreeing(self, weights: Array) -> Array:
        """Return twice (pairs in the same order - pairs in opposite order). weights: (draws, n).

        Each level counts the pairs whose ranks differ first in its bit."""
        total = np.zeros(len(weights))
        for level in self._levels:
            w = weights[:, level.order]
            low = np.zeros((len(w), w.shape[1] + 1))
            np.cumsum(w * level.is_low, axis=1, out=low[:, 1:])
            first, begin, end, last = (low[:, edge] for edge in level.edges)
            # lower ones that the other score also ranks lower, minus those that it ranks higher
            total += (w[:, level.high] * ((begin - first) - (last - end))).sum(1)
        return 2 * total


def _level(split: Array, other: Array, bit: int) -> _Level:
    group = split >> (bit + 1)
    order = np.lexsort((other, group))
    is_low = (split[order] >> bit) & 1 == 0
    high = np.flatnonzero(~is_low)
    groups = _runs(group[order])
    ties = _runs(group[order], other[order])
    edges = (groups[0][high], ties[0][high], ties[1][high], groups[1][high])
    return _Level(order, is_low, high, edges)


def _runs(*keys: Array) -> tuple[Array, Array]:
    """Return, for each position of sorted keys, where the run of equal keys begins and ends."""
    changes = np.logical_or.reduce([np.diff(key) != 0 for key in keys])
    bounds = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(keys[0])]))
    lengths = np.diff(bounds)
    return np.repeat(bounds[:-1], lengths), np.repeat(bounds[1:], lengths)


def _untied(weights: Array, ranks: Array) -> Array:
    """Return the number of ordered pairs whose ranks differ. weights: (draws, n)."""
    order = np.argsort(ranks, kind="stable")
    begins = np.searchsorted(ranks[order], np.arange(int(ranks.max(initial=0)) + 1))
    weight_by_rank = np.add.reduceat(weights[:, order], begins, axis=1)
    return weights.sum(1) ** 2 - (weight_by_rank**2).sum(1)
