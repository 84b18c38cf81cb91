"""How scores agree with people: by segment, and by system.

A metric's and the people's scores are matrices `(segments, systems)`, higher is better, NaN where
there is no common translation. Each figure is a function of weights of segments and of systems,
`(draws, segments)` and `(draws, systems)`: all ones is the figure itself, the counts of a resample
give one draw of the bootstrap. What does not depend on the weights is done once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scorekit.metaeval.concordance import Concordance

Array = Any

#: Figure -> its title. `epsilon` is told beside `acc_eq`.
FIGURES = {
    "kendall": "Kendall, all rows",
    "kendall_item": "Kendall, by segment",
    "acc_eq": "pairwise accuracy, ties calibrated",
    "pearson": "Pearson, all rows",
    "system_accuracy": "system pairwise accuracy",
    "system_pearson": "system Pearson",
}


@dataclass(frozen=True)
class DrawWeights:
    """Of one kind: the other's are all ones. by: `segments` or `systems`. values: (draws, n)."""

    by: str
    values: Array


def resamples(by: str, count: int, draws: int, seed: int) -> DrawWeights:
    """How often each of `count` is drawn, in `draws` resamples of as many with replacement."""
    rng = np.random.default_rng(seed)
    return DrawWeights(by, rng.multinomial(count, [1 / count] * count, size=draws).astype(float))


def ones(by: str, count: int) -> DrawWeights:
    """The sample itself."""
    return DrawWeights(by, np.ones((1, count)))


class Agreement:
    """The sums of one metric. human, metric: (segments, systems), NaN in the same places."""

    def __init__(self, human: Array, metric: Array) -> None:
        self.human, self.metric = human, metric
        self.there = ~np.isnan(human)
        self._at = dict(zip(("segments", "systems"), np.nonzero(self.there), strict=True))
        self._pooled = Concordance(human[self.there], metric[self.there])
        self._pairs = _Pairs(human, metric)

    def figures(self, weights: DrawWeights) -> dict[str, Array]:
        """Each of FIGURES, and `epsilon`: (draws,), NaN where it is not defined."""
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
        """tau-b over all pairs of translations. Kendall 1945."""
        s, a, b = self._pooled.sums(weights.values, self._at[weights.by])
        return _ratio(s, np.sqrt(a * b))

    def _pearson(self, weights: DrawWeights) -> Array:
        axis = 1 if weights.by == "segments" else 0
        h, m = _centred(self.human), _centred(self.metric)
        sums = [np.nansum(one, axis) for one in (h, m, h * h, m * m, h * m)]
        n = weights.values @ self.there.sum(axis)
        return _correlation(n, *(weights.values @ one for one in sums))

    def _systems(self, weights: DrawWeights) -> tuple[Array, Array]:
        """Share of the pairs of systems that people tell apart and that the metric orders as they
        do, its ties being wrong (Kocmi et al. 2021, arXiv 2107.10821); Pearson of their means."""
        draws, systems = len(weights.values), self.human.shape[1]
        by_segment = weights.by == "segments"
        w = weights.values if by_segment else np.ones((1, len(self.human)))
        n = w @ self.there
        h, m = (
            _ratio(w @ np.nan_to_num(x), n) for x in (_centred(self.human), _centred(self.metric))
        )
        h, m = (np.broadcast_to(x, (draws, systems)) for x in (h, m))
        v = np.ones((draws, systems)) if by_segment else weights.values
        v = np.where(np.isnan(h), 0.0, v)
        h, m = np.nan_to_num(h), np.nan_to_num(m)
        first, second = np.triu_indices(systems, 1)
        order = _sign(h[:, first] - h[:, second])
        same = order * _sign(m[:, first] - m[:, second]) > 0
        of = v[:, first] * v[:, second] * (order != 0)
        accuracy = _ratio((of * same).sum(1), of.sum(1))
        sums = [(v * x).sum(1) for x in (h, m, h * h, m * m, h * m)]
        return accuracy, _correlation(v.sum(1), *sums)


class _Pairs:
    """The pairs of translations of one segment."""

    def __init__(self, human: Array, metric: Array) -> None:
        first, second = np.triu_indices(human.shape[1], 1)
        h, m = (x[:, first] - x[:, second] for x in (human, metric))
        there = ~np.isnan(h)
        self.segments = len(human)
        self.item, column = np.nonzero(there)
        self.first, self.second = first[column], second[column]
        h, m = np.sign(h[there]), m[there]
        self.s, self.a, self.b = h * np.sign(m), abs(h), abs(np.sign(m))
        self.distance = abs(m)
        self.order = np.argsort(self.distance, kind="stable")
        sorted_distance = self.distance[self.order]
        #: Places where a threshold may lie: behind the last of equal distances.
        self.ends = np.flatnonzero(np.append(np.diff(sorted_distance) > 0, True))[: len(h)]
        self.thresholds = sorted_distance[self.ends]

    def weights(self, weights: DrawWeights, draw: int) -> tuple[Array, Array]:
        """(of each pair, of each segment)"""
        w = weights.values[draw]
        if weights.by == "segments":
            return np.ones(len(self.item)), w
        return w[self.first] * w[self.second], np.ones(self.segments)

    def kendall(self, weights: DrawWeights) -> Array:
        """Mean of the segments' tau-b, without those where it is not defined (all tied)."""
        found = np.full(len(weights.values), np.nan)
        for draw in range(len(found)):
            of, per = self.weights(weights, draw)
            s, a, b = (
                np.bincount(self.item, of * x, self.segments) for x in (self.s, self.a, self.b)
            )
            tau = _ratio(s, np.sqrt(a * b))
            known = ~np.isnan(tau)
            found[draw] = _ratio((per * np.nan_to_num(tau)).sum(), (per * known).sum())
        return found

    def calibrated(self, weights: DrawWeights) -> tuple[Array, Array]:
        """(accuracy, epsilon): pairs whose scores differ by epsilon at most are the metric's ties,
        and right where people tie them; the accuracies of the segments are averaged, and epsilon is
        the (smallest) one that makes their mean largest. Deutsch et al. 2023, arXiv 2305.14324.
        All observed distances are tried, where their code may take a sample of them."""
        draws = len(weights.values)
        best, at = np.full(draws, np.nan), np.full(draws, np.nan)
        right = self.s > 0
        gain = (self.a == 0).astype(float) - right  # of a pair that becomes a tie
        for draw in range(draws):
            of, per = self.weights(weights, draw)
            total = np.bincount(self.item, of, self.segments)
            counted = per * (total > 0)
            if not counted.sum():
                continue
            share = of * _ratio(counted, total)[self.item] / counted.sum()
            share = np.nan_to_num(share)
            gains = np.cumsum((share * gain)[self.order])[self.ends]
            # 0: equal scores alone are ties, which never costs
            gains, thresholds = np.append(0.0, gains), np.append(0.0, self.thresholds)
            place = int(np.argmax(gains > gains.max() - 1e-12))
            best[draw] = (share * right).sum() + gains[place]
            at[draw] = thresholds[place]
        return best, at


def _sign(values: Array) -> Array:
    """Of differences of means: what rounding leaves is a tie."""
    return np.where(abs(values) < 1e-12, 0.0, np.sign(values))


def _centred(values: Array) -> Array:
    """So that sums of squares lose no digits."""
    return values - np.nanmean(values)


def _ratio(above: Array, below: Array) -> Array:
    """NaN where the divisor is nothing."""
    below = np.asarray(below, float)
    return np.where(below > 1e-12, above / np.where(below > 1e-12, below, 1.0), np.nan)


def _correlation(n: Array, h: Array, m: Array, hh: Array, mm: Array, hm: Array) -> Array:
    """Pearson's of sums; NaN where one of the two does not vary."""
    spread = [squares - sums**2 / n for squares, sums in ((hh, h), (mm, m))]
    scale = [np.maximum(squares, 1e-300) for squares in (hh, mm)]
    varies = (spread[0] > 1e-12 * scale[0]) & (spread[1] > 1e-12 * scale[1])
    below = np.sqrt(np.where(varies, spread[0] * spread[1], 1.0))
    return np.where(varies, (hm - h * m / n) / below, np.nan)
