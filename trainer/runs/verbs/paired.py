"""Paired differences of two policies on the same sources, with bootstrap intervals.

Both do the same sources; sources are drawn anew with replacement, and each draw gives a difference
between the two (Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation",
section 3). The interval lies between the 2.5 % and the 97.5 % quantile of these differences (the
percentile interval: Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainer.runs.figures import Figure

RESAMPLES = 2000
SEED = 0
#: Quantiles of so few sources say nothing: no interval is given.
FEWEST = 10
Line = Mapping[str, Any]


class PairedMean(NamedTuple):
    """standard_error: of the mean; None of fewer than two differences."""

    mean: float
    standard_error: float | None

    @property
    def errors(self) -> float | None:
        """How many standard errors the mean lies above 0."""
        if self.standard_error is None:
            return None
        if self.standard_error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.standard_error


def paired_standard_error(differences: Sequence[float]) -> PairedMean:
    """Mean and standard error s / sqrt(n) of paired differences, s with n - 1. Raises ValueError
    of nothing."""
    if not len(differences):
        raise ValueError("there are no differences")
    values = np.asarray(differences, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return PairedMean(float(values.mean()), error)


@dataclass(frozen=True, slots=True)
class PairedFigure:
    """One figure of two policies.

    sources: those that both have it for; left_out: the others (a service failed, no reference).
    first, second: of each policy, over `sources`. difference: second - first.
    low, high: its 95 % interval; None of fewer than FEWEST sources.
    worse: share of the draws in which the second is worse, a tie counting half; None where neither
        direction is better.
    higher_is_better: None where neither is.
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
        """Of the second: "better" or "worse" where the interval leaves 0 out, else ""."""
        if self.low is None or self.high is None or self.higher_is_better is None:
            return ""
        if self.low <= 0 <= self.high:
            return ""
        return "better" if (self.low > 0) == self.higher_is_better else "worse"


def comparison_values(
    policies: tuple[str, str],
    counted: Mapping[str, Any],
    paired: Sequence[PairedFigure] | Mapping[str, Sequence[PairedFigure]],
) -> dict[str, Any]:
    """comparison.json. counted: what was compared, and how many. paired: figures, or those of each
    group by name."""

    def told(figures: Sequence[PairedFigure]) -> list[dict[str, Any]]:
        return [asdict(figure) | {"verdict": figure.verdict} for figure in figures]

    values = {"first": policies[0], "second": policies[1], **counted}
    values |= {"resamples": RESAMPLES, "seed": SEED}
    if isinstance(paired, Mapping):
        return values | {"groups": {name: told(figures) for name, figures in paired.items()}}
    return values | {"figures": told(paired)}


class FigureRow(NamedTuple):
    """A `PairedFigure` ready to be shown."""

    title: str
    sources: str
    first: str
    second: str
    difference: str
    interval: str
    worse: str
    verdict: str


def as_row(figure: PairedFigure) -> FigureRow:
    """Its numbers as text; where some sources are left out, `sources` says how many."""

    def show(value: float | None, form: str = ".3f") -> str:
        return "–" if value is None else format(value, form)

    interval = "–" if figure.low is None else f"{figure.low:+.3f} to {figure.high:+.3f}"
    left_out = f" (-{figure.left_out})" if figure.left_out else ""
    return FigureRow(
        figure.title,
        f"{figure.sources}{left_out}",
        show(figure.first),
        show(figure.second),
        show(figure.difference, "+.3f"),
        interval,
        show(figure.worse),
        figure.verdict,
    )


def compare_lines(
    table: Sequence[Figure],
    first: Sequence[Line],
    second: Sequence[Line],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[PairedFigure]:
    """The figures of `table` that a line of a dump has (`of_line`), over the sources that both
    policies have them for. first, second: lines of the same sources in the same order."""
    figures = []
    for shown in table:
        if shown.of_line is None:
            continue
        values = [(shown.of_line(a), shown.of_line(b)) for a, b in zip(first, second, strict=True)]
        both = [pair for pair in values if None not in pair]
        if None in shown.hidden_at and not both:
            continue
        stats = np.array(both, dtype=np.float64).reshape(-1, 2, 1)
        mean = partial(_mean, count=len(both))
        left_out = len(values) - len(both)
        higher = None if shown.better is None else shown.better == "higher"
        figures.append(
            paired_figure(shown.title, shown.key, stats, left_out, mean, higher, resamples, seed)
        )
    return figures


def _mean(sums: Any, count: int) -> float:
    return float(sums[0] / count)


def paired_figure(
    title: str,
    key: str,
    stats_N2S: Any,
    left_out: int,
    score: Callable[[Any], float],
    higher: bool | None,
    resamples: int,
    seed: int,
) -> PairedFigure:
    """stats_N2S: statistics of each source for either policy; `score` of their sums is a figure."""
    count = len(stats_N2S)
    if not count:
        unknown = dict.fromkeys(("first", "second", "difference", "low", "high", "worse"))
        return PairedFigure(title, key, 0, left_out, **unknown, higher_is_better=higher)
    first, second = (score(sums) for sums in stats_N2S.sum(axis=0))
    low = high = worse = None
    if count >= FEWEST:
        changes = bootstrap_differences(stats_N2S, score, resamples, seed)
        low, high = percentile_interval(changes)
        if higher is not None:
            wrong = changes < 0 if higher else changes > 0
            worse = float(np.mean(wrong) + np.mean(changes == 0) / 2)
    return PairedFigure(
        title, key, count, left_out, first, second, second - first, low, high, worse, higher
    )


def bootstrap_differences(
    stats_N2S: Any, score: Callable[[Any], float], resamples: int = RESAMPLES, seed: int = SEED
) -> Any:
    """The difference of the second to the first in each of `resamples` draws of N sources.

    stats_N2S: statistics that add up over sources, [N, 2, S]. score: of their sums [S].
    """
    random = np.random.default_rng(seed)
    count = len(stats_N2S)
    flat = stats_N2S.reshape(count, -1)
    differences = np.empty(resamples)
    for draw in range(resamples):
        times = np.bincount(random.integers(count, size=count), minlength=count)
        first, second = (times @ flat).reshape(2, -1)
        differences[draw] = score(second) - score(first)
    return differences


def percentile_interval(draws: Any) -> tuple[float, float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
