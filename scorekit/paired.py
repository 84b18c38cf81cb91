"""Paired differences of two policies or systems on the same sources, with bootstrap intervals.

Sources are resampled with replacement, and each resample gives a difference between the two (Koehn
2004, "Statistical Significance Tests for Machine Translation Evaluation", section 3). The interval
is between the 2.5 % and the 97.5 % quantile of these differences (the percentile interval: Efron
and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

RESAMPLES = 2000
SEED = 0
#: With fewer sources the quantiles mean nothing: no interval is given.
FEWEST = 10
T = TypeVar("T")


class PairedMean(NamedTuple):
    """A mean with its standard error.

    standard_error: None with fewer than two differences.
    """

    mean: float
    standard_error: float | None

    @property
    def errors(self) -> float | None:
        """Return how many standard errors the mean is above 0."""
        if self.standard_error is None:
            return None
        if self.standard_error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.standard_error


def paired_standard_error(differences: Sequence[float]) -> PairedMean:
    """Return mean and standard error s / sqrt(n) of paired differences, s with n - 1.

    Raises ValueError without differences.
    """
    if not len(differences):
        raise ValueError("there are no differences")
    values = np.asarray(differences, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return PairedMean(float(values.mean()), error)


@dataclass(frozen=True, slots=True)
class PairedStat:
    """One stat of two policies.

    sources: those for which both have it.
    left_out: the others (a service failed, no reference).
    first, second: of each policy, over `sources`.
    difference: second - first.
    low, high: its 95 % interval; None with fewer than FEWEST sources.
    worse: share of the resamples in which the second is worse, a tie counts half; None if no
    direction is better.
    higher_is_better: None if no direction is better.
    """

    title: str
    key: str
    sources: int
    left_out: int
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    worse: float | None
    higher_is_better: bool | None

    @property
    def verdict(self) -> str:
        """Return "better" or "worse" for the second if the interval excludes 0, else ""."""
        if self.low is None or self.high is None or self.higher_is_better is None:
            return ""
        if self.low <= 0 <= self.high:
            return ""
        return "better" if (self.low > 0) == self.higher_is_better else "worse"


def comparison_values(
    policies: tuple[str, str],
    counted: Mapping[str, Any],
    paired: Sequence[PairedStat] | Mapping[str, Sequence[PairedStat]],
) -> dict[str, Any]:
    """Return the contents of comparison.json.

    counted: what was compared, and how many.
    paired: stats, or those of each group by name.
    """

    def describe(stats: Sequence[PairedStat]) -> list[dict[str, Any]]:
        return [asdict(stat) | {"verdict": stat.verdict} for stat in stats]

    values = {"first": policies[0], "second": policies[1], **counted}
    values |= {"resamples": RESAMPLES, "seed": SEED}
    if isinstance(paired, Mapping):
        return values | {"groups": {name: describe(stats) for name, stats in paired.items()}}
    return values | {"figures": describe(paired)}


class StatRow(NamedTuple):
    """A `PairedStat` as text."""

    title: str
    sources: str
    first: str
    second: str
    difference: str
    interval: str
    worse: str
    verdict: str


def as_row(stat: PairedStat) -> StatRow:
    """Return its numbers as text; if some sources are left out, `sources` has their number."""

    def show(value: float | None, form: str = ".3f") -> str:
        return "–" if value is None else format(value, form)

    interval = "–" if stat.low is None else f"{stat.low:+.3f} to {stat.high:+.3f}"
    left_out = f" (-{stat.left_out})" if stat.left_out else ""
    return StatRow(
        stat.title,
        f"{stat.sources}{left_out}",
        show(stat.first),
        show(stat.second),
        show(stat.difference, "+.3f"),
        interval,
        show(stat.worse),
        stat.verdict,
    )


def paired_mean(
    title: str, key: str, pairs: Sequence[Sequence[float]], left_out: int, higher: bool | None
) -> PairedStat:
    """Return the paired stat of two means.

    pairs: the value of each source for either policy.
    """
    pairs_N2S = np.array(pairs, dtype=np.float64).reshape(-1, 2, 1)
    mean = partial(_mean, count=len(pairs))
    return paired_stat(title, key, pairs_N2S, left_out, mean, higher)


def mean_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of paired differences."""
    pairs_N2S = np.array([(0.0, value) for value in differences], dtype=np.float64)[:, :, None]
    mean = partial(_mean, count=len(differences))
    return percentile_interval(bootstrap_differences(pairs_N2S, mean))


def _mean(sums: Any, count: int) -> float:
    return float(sums[0] / count)


def paired_stat(
    title: str,
    key: str,
    stats_N2S: Any,
    left_out: int,
    score: Callable[[Any], float],
    higher: bool | None,
) -> PairedStat:
    """Return the paired stat of two policies.

    stats_N2S: statistics of each source for either policy; `score` maps their sums to the stat.
    """
    count = len(stats_N2S)
    if not count:
        unknown = dict.fromkeys(("first", "second", "difference", "low", "high", "worse"))
        return PairedStat(title, key, 0, left_out, **unknown, higher_is_better=higher)
    first, second = (score(sums) for sums in stats_N2S.sum(axis=0))
    low = high = worse = None
    if count >= FEWEST:
        changes = bootstrap_differences(stats_N2S, score, RESAMPLES)
        low, high = percentile_interval(changes)
        if higher is not None:
            wrong = changes < 0 if higher else changes > 0
            worse = float(np.mean(wrong) + np.mean(changes == 0) / 2)
    return PairedStat(
        title, key, count, left_out, first, second, second - first, low, high, worse, higher
    )


def bootstrap_differences(
    stats_N2S: Any, score: Callable[[Any], float], resamples: int = RESAMPLES
) -> Any:
    """Return the difference second - first in each of `resamples` resamples of N sources.

    stats_N2S: statistics that add up over sources, [N, 2, S].
    score: of their sums [S].
    """
    random = np.random.default_rng(SEED)
    count = len(stats_N2S)
    flat = stats_N2S.reshape(count, -1)
    differences = np.empty(resamples)
    for draw in range(resamples):
        times = np.bincount(random.integers(count, size=count), minlength=count)
        first, second = (times @ flat).reshape(2, -1)
        differences[draw] = score(second) - score(first)
    return differences


def percentile_interval(draws: Any) -> tuple[float, float]:
    """Return the middle 95 % of the differences."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def indices_by_group(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each group, in the order of their first one; {} for a single group."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    return groups if len(groups) > 1 else {}


def largest_changes(
    pairs: Sequence[tuple[T, T]],
    value_of: Callable[[T], float | None],
    by: str,
    limit: int,
    sign: int = 1,
) -> list[tuple[str, list[tuple[T, T]]]] | None:
    """Return (title, pairs) of the samples that improved most, and of those that worsened most.

    None: no sample has both values.
    by: the end of the titles.
    limit: max pairs of each.
    sign: -1 if lower is better.
    """
    changes = [
        (sign * (new - old), pair)
        for pair in pairs
        if (old := value_of(pair[0])) is not None and (new := value_of(pair[1])) is not None
    ]
    if not changes:
        return None
    changes.sort(key=lambda change: change[0])
    improved = [pair for change, pair in reversed(changes) if change > 0]
    worsened = [pair for change, pair in changes if change < 0]
    kinds = ((f"Improved most{by}", improved), (f"Worsened most{by}", worsened))
    return [(title, chosen[:limit]) for title, chosen in kinds if chosen]
