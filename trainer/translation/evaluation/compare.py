"""Two policies on the same sources: paired differences with bootstrap intervals.

Both translate the same sources; sources are drawn anew with replacement, and each draw gives a
difference between the two (Koehn 2004, "Statistical Significance Tests for Machine Translation
Evaluation", section 3). The interval lies between the 2.5 % and the 97.5 % quantile of these
differences (the percentile interval: Efron and Tibshirani 1993, chapter 13). Corpus chrF and BLEU
are computed anew for each draw, from the sums of the segments' statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainer.translation.evaluation.figures import CHRF, ranking, table
from trainer.translation.evaluation.quality import corpus_metrics

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


def compare_policies(
    first: Sequence[Line], second: Sequence[Line], resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, list[PairedFigure]]:
    """Figures of all sources under "all", and of each language pair where there are several.

    first, second: the lines of two evaluation dumps (trainer/translation/dumps.py), of the same
    sources in the same order. Raises ValueError where they are not.
    """
    sources = [[(line.get("pair"), line["src"]) for line in lines] for lines in (first, second)]
    if sources[0] != sources[1]:
        raise ValueError("the two evaluations are not of the same sources in the same order")
    groups = {"all": list(range(len(first)))}
    pairs = dict.fromkeys(line.get("pair", "") for line in first)
    if len(pairs) > 1:
        for pair in pairs:
            groups[pair] = [i for i, line in enumerate(first) if line.get("pair", "") == pair]
    return {
        name: _compare([first[i] for i in chosen], [second[i] for i in chosen], resamples, seed)
        for name, chosen in groups.items()
    }


def _compare(
    first: Sequence[Line], second: Sequence[Line], resamples: int, seed: int
) -> list[PairedFigure]:
    figures = []
    for shown in table():
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
            _figure(shown.title, shown.key, stats, left_out, mean, higher, resamples, seed)
        )
    both_lines = [(a, b) for a, b in zip(first, second, strict=True) if a.get("ref")]
    if not both_lines:
        return figures
    references = [[a["ref"] for a, _ in both_lines]]
    for name, metric in corpus_metrics([a.get("pair", "") for a, _ in both_lines]).items():
        # The statistics of its segments, as sacrebleu.significance takes them.
        of_each = [
            metric._extract_corpus_statistics([lines[k]["mt"] for lines in both_lines], references)
            for k in (0, 1)
        ]
        stats = np.array(of_each, dtype=np.float64).transpose(1, 0, 2)
        score = partial(_corpus_score, metric=metric)
        title = {"chrf": "chrF", "bleu": "BLEU"}[name]
        left_out = len(first) - len(both_lines)
        figures.append(_figure(title, name, stats, left_out, score, True, resamples, seed))
    return figures


def _mean(sums: Any, count: int) -> float:
    return float(sums[0] / count)


def _corpus_score(sums: Any, metric: Any) -> float:
    return float(metric._compute_score_from_stats([int(value) for value in sums]).score)


def _figure(
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


def changed_most(
    first: Sequence[Line], second: Sequence[Line], shown: int
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    """(title, pairs of lines): whose score the second policy improved most, and worsened most.

    By the first of `ranking` that scored both (MetricX, xCOMET), else by chrF of the segment.
    """
    both = list(zip(first, second, strict=True))
    for judge in (*ranking(), CHRF):
        changes = [
            (judge.sign * (later - earlier), a, b)
            for a, b in both
            if (earlier := judge.of(a)) is not None and (later := judge.of(b)) is not None
        ]
        if changes:
            return _changed_by(judge.who, changes, shown)
    return []


def _changed_by(
    name: str, changes: list[tuple[float, Line, Line]], shown: int
) -> list[tuple[str, list[tuple[Line, Line]]]]:
    changes.sort(key=lambda change: change[0])
    chosen = (
        (f"Improved most, says {name}", [(a, b) for c, a, b in changes[::-1][:shown] if c > 0]),
        (f"Worsened most, says {name}", [(a, b) for c, a, b in changes[:shown] if c < 0]),
    )
    return [(title, pairs) for title, pairs in chosen if pairs]
