"""Agreement of scores with human scores, by segment and by system.

A metric's and the people's scores are matrices `(segments, systems)`, higher is better, NaN where
there is no common translation. Each statistic is a function of weights of segments and of systems,
`(draws, segments)` and `(draws, systems)`: weights of one give the statistic itself, the counts of
a resample give one draw of the bootstrap. Whatever does not depend on the weights is computed once.

Kendall's tau over all rows counts the pairs of translations that two scores order alike. A
translation of weight w counts as w copies of it. Copies are not ordered among themselves, and
translations i and j make `w_i * w_j` pairs. The number of pairs grows with the square of the number
n of translations; time per draw, and memory, grow with `n * log(levels)`: the levels are the
distinct values of the score that has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any

#: Size of a block of weights (draws * translations), 8 bytes each.
_BLOCK = 1 << 17
#: Statistic -> its title. `epsilon` is reported beside `acc_eq`.
STATS = {
    "kendall": "Kendall, all rows",
    "kendall_item": "Kendall, by segment",
    "acc_eq": "pairwise accuracy, ties calibrated",
    "pearson": "Pearson, all rows",
    "system_accuracy": "system pairwise accuracy",
    "system_pearson": "system Pearson",
}


@dataclass(frozen=True)
class DrawWeights:
    """Weights of one kind; the other's are 1.

    by: `segments` or `systems`.
    values: (draws, n).
    """

    by: str
    values: Array


def resamples(by: str, count: int, draws: int, seed: int) -> DrawWeights:
    """Return how often each of `count` is drawn, in `draws` resamples with replacement."""
    rng = np.random.default_rng(seed)
    return DrawWeights(by, rng.multinomial(count, [1 / count] * count, size=draws).astype(float))


def ones(by: str, count: int) -> DrawWeights:
    """Return the weights of the sample itself."""
    return DrawWeights(by, np.ones((1, count)))


class Agreement:
    """Sums for one metric.

    human, metric: (segments, systems), NaN in the same positions.
    """

    def __init__(self, human: Array, metric: Array) -> None:
        self.human, self.metric = human, metric
        self.is_present = ~np.isnan(human)
        self._group_indices = dict(
            zip(("segments", "systems"), np.nonzero(self.is_present), strict=True)
        )
        self._pooled = Concordance(human[self.is_present], metric[self.is_present])
        self._pairs = _Pairs(human, metric)

    def stats(self, weights: DrawWeights) -> dict[str, Array]:
        """Return each of STATS, and `epsilon`: (draws,), NaN if it is not defined."""
        accuracy, epsilon = self._pairs.calibrated(weights)
        system_accuracy, system_pearson = self._systems(weights)
        return {
            "kendall": self._kendall(weights),
            "kendall_item": self._pairs.kendall(weights),
            "acc_eq": accuracy,
            "epsilon": epsilon,
            "pearson": self._pearson(weights),
            "system_accuracy": system_accuracy,
            "system_pearson": system_pearson,
        }

    def _kendall(self, weights: DrawWeights) -> Array:
        """Return tau-b over all pairs of translations. Kendall 1945."""
        s, a, b = self._pooled.sums(weights.values, self._group_indices[weights.by])
        return _ratio(s, np.sqrt(a * b))

    def _pearson(self, weights: DrawWeights) -> Array:
        axis = 1 if weights.by == "segments" else 0
        h, m = _center(self.human), _center(self.metric)
        sums = [np.nansum(values, axis) for values in (h, m, h * h, m * m, h * m)]
        n = weights.values @ self.is_present.sum(axis)
        return _correlation(n, *(weights.values @ values for values in sums))

    def _systems(self, weights: DrawWeights) -> tuple[Array, Array]:
        """Return the pairwise accuracy of systems and the Pearson correlation of their means.

        Accuracy: the share of the pairs of systems with different human means that the metric
        orders the same way; its ties are wrong (Kocmi et al. 2021, arXiv 2107.10821)."""
        draws, systems = len(weights.values), self.human.shape[1]
        by_segment = weights.by == "segments"
        w = weights.values if by_segment else np.ones((1, len(self.human)))
        n = w @ self.is_present
        h, m = (
            _ratio(w @ np.nan_to_num(x), n) for x in (_center(self.human), _center(self.metric))
        )
        h, m = (np.broadcast_to(x, (draws, systems)) for x in (h, m))
        v = np.ones((draws, systems)) if by_segment else weights.values
        v = np.where(np.isnan(h), 0.0, v)
        h, m = np.nan_to_num(h), np.nan_to_num(m)
        first, second = np.triu_indices(systems, 1)
        order = _sign(h[:, first] - h[:, second])
        same = order * _sign(m[:, first] - m[:, second]) > 0
        pair_weights = v[:, first] * v[:, second] * (order != 0)
        accuracy = _ratio((pair_weights * same).sum(1), pair_weights.sum(1))
        sums = [(v * x).sum(1) for x in (h, m, h * h, m * m, h * m)]
        return accuracy, _correlation(v.sum(1), *sums)


class _Pairs:
    """Pairs of translations of the same segment."""

    def __init__(self, human: Array, metric: Array) -> None:
        first, second = np.triu_indices(human.shape[1], 1)
        h, m = (x[:, first] - x[:, second] for x in (human, metric))
        is_present = ~np.isnan(h)
        self.segments = len(human)
        self.item, column = np.nonzero(is_present)
        self.first, self.second = first[column], second[column]
        h, m = np.sign(h[is_present]), m[is_present]
        self.s, self.a, self.b = h * np.sign(m), abs(h), abs(np.sign(m))
        self.distance = abs(m)
        self.order = np.argsort(self.distance, kind="stable")
        sorted_distance = self.distance[self.order]
        #: Positions where a threshold may lie: after the last of equal distances.
        self.ends = np.flatnonzero(np.append(np.diff(sorted_distance) > 0, True))[: len(h)]
        self.thresholds = sorted_distance[self.ends]

    def weights(self, weights: DrawWeights, draw: int) -> tuple[Array, Array]:
        """Return (weight of each pair, weight of each segment)."""
        w = weights.values[draw]
        if weights.by == "segments":
            return np.ones(len(self.item)), w
        return w[self.first] * w[self.second], np.ones(self.segments)

    def kendall(self, weights: DrawWeights) -> Array:
        """Return the mean tau-b of the segments in which it is defined (not all tied)."""
        means = np.full(len(weights.values), np.nan)
        for draw in range(len(means)):
            pair_weights, segment_weights = self.weights(weights, draw)
            s, a, b = (
                np.bincount(self.item, pair_weights * x, self.segments)
                for x in (self.s, self.a, self.b)
            )
            tau = _ratio(s, np.sqrt(a * b))
            is_defined = ~np.isnan(tau)
            means[draw] = _ratio(
                (segment_weights * np.nan_to_num(tau)).sum(), (segment_weights * is_defined).sum()
            )
        return means

    def calibrated(self, weights: DrawWeights) -> tuple[Array, Array]:
        """Return (accuracy, epsilon).

        Pairs whose scores differ by at most epsilon are the metric's ties, and right if people tie
        them. The accuracies of the segments are averaged; epsilon is the smallest one with the
        largest mean. Deutsch et al. 2023, arXiv 2305.14324. All observed distances are tried; their
        code may sample.
        """
        draws = len(weights.values)
        accuracy, epsilon = np.full(draws, np.nan), np.full(draws, np.nan)
        right = self.s > 0
        gain = (self.a == 0).astype(float) - right  # of a pair that becomes a tie
        for draw in range(draws):
            pair_weights, segment_weights = self.weights(weights, draw)
            total = np.bincount(self.item, pair_weights, self.segments)
            counted = segment_weights * (total > 0)
            if not counted.sum():
                continue
            share = pair_weights * _ratio(counted, total)[self.item] / counted.sum()
            share = np.nan_to_num(share)
            gains = np.cumsum((share * gain)[self.order])[self.ends]
            # At 0 only equal scores are ties, which never costs.
            gains, thresholds = np.append(0.0, gains), np.append(0.0, self.thresholds)
            position = int(np.argmax(gains > gains.max() - 1e-12))
            accuracy[draw] = (share * right).sum() + gains[position]
            epsilon[draw] = thresholds[position]
        return accuracy, epsilon


def _sign(values: Array) -> Array:
    """Return the signs of differences of means; rounding errors are ties."""
    return np.where(abs(values) < 1e-12, 0.0, np.sign(values))


def _center(values: Array) -> Array:
    """Subtract the mean, so that sums of squares lose no digits."""
    return values - np.nanmean(values)


def _ratio(above: Array, below: Array) -> Array:
    """Return above / below; NaN if the divisor is zero."""
    below = np.asarray(below, float)
    return np.where(below > 1e-12, above / np.where(below > 1e-12, below, 1.0), np.nan)


def _correlation(n: Array, h: Array, m: Array, hh: Array, mm: Array, hm: Array) -> Array:
    """Return Pearson's correlation from sums; NaN if one of the two does not vary."""
    spread = [squares - sums**2 / n for squares, sums in ((hh, h), (mm, m))]
    scale = [np.maximum(squares, 1e-300) for squares in (hh, mm)]
    varies = (spread[0] > 1e-12 * scale[0]) & (spread[1] > 1e-12 * scale[1])
    below = np.sqrt(np.where(varies, spread[0] * spread[1], 1.0))
    return np.where(varies, (hm - h * m / n) / below, np.nan)


class _Level(NamedTuple):
    """One bit of the split score's ranks. Translations that share all higher bits are a group:
    those with the bit unset have lower scores than those with it set.

    order: translations by group, and by the other score in it.
    is_low: bit unset, in that order.
    high: positions where it is set.
    edges: for each of `high`, the positions where its group begins, where the other score's equal
        values begin and end, and where the group ends.
    """

    order: Array
    is_low: Array
    high: Array
    edges: tuple[Array, Array, Array, Array]


class Concordance:
    """Pair counts of two scores.

    human, metric: (n,), no NaN.
    """

    def __init__(self, human: Array, metric: Array) -> None:
        self._ranks = [np.unique(x, return_inverse=True)[1].reshape(-1) for x in (human, metric)]
        split, other = sorted(self._ranks, key=lambda ranks: int(ranks.max(initial=0)))
        bits = int(split.max(initial=0)).bit_length()
        self._levels = [_level(split, other, bit) for bit in range(bits)]

    def sums(self, weights: Array, group_of: Array) -> tuple[Array, Array, Array]:
        """Return sums over ordered pairs, (draws,) each; integers below 2**53 are exact.

        The sum of the products of both signs, and the number of pairs that are not tied in the
        human scores, and in the metric's.

        weights: (draws, groups).
        group_of: (n,), the group of each translation.
        """
        step = max(1, _BLOCK // max(1, len(group_of)))
        blocks = [weights[k : k + step][:, group_of] for k in range(0, len(weights), step)]
        parts = [
            (self._agreeing(w), *(_count_untied(w, ranks) for ranks in self._ranks)) for w in blocks
        ]
        s, a, b = (np.concatenate(column) for column in zip(*parts, strict=True))
        return s, a, b

    def _agreeing(self, weights: Array) -> Array:
        """Return twice (pairs in the same order - pairs in opposite order).

        weights: (draws, n).

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


def _count_untied(weights: Array, ranks: Array) -> Array:
    """Return the number of ordered pairs whose ranks differ.

    weights: (draws, n).
    """
    order = np.argsort(ranks, kind="stable")
    begins = np.searchsorted(ranks[order], np.arange(int(ranks.max(initial=0)) + 1))
    weight_by_rank = np.add.reduceat(weights[:, order], begins, axis=1)
    return weights.sum(1) ** 2 - (weight_by_rank**2).sum(1)
