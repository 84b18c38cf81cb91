"""Compute all statistics of all metrics on the rows that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scorekit.errors import UserError
from scorekit.metaeval import agreement, spans
from scorekit.metaeval.judgements import JudgedTranslation, Span
from scorekit.metaeval.metrics import MetricScores

Array = Any
KINDS = ("segments", "systems")
#: Baselines that every metric should beat.
CONSTANT, LENGTH, EVERYTHING = "constant", "length only", "all marked"


@dataclass
class MetricStats:
    """The statistics of one metric.

    values, intervals: statistic -> number, and kind of bootstrap -> (low, high); None if it is not
    defined.
    beyond: statistics above the length-only metric's in 97.5 % of the draws of both kinds (paired:
    the same draws).
    span_rows: number of translations that its span statistics use."""

    name: str
    model: str
    is_baseline: bool
    asked: int
    scored: int
    failed: dict[str, int]
    truncated: int
    values: dict[str, float | None] = field(default_factory=dict)
    intervals: dict[str, dict[str, tuple[float, float] | None]] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)
    span_rows: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)
    system_scores: dict[str, float | None] = field(default_factory=dict)
    repeated: int = 0


@dataclass
class MetaEvaluation:
    """The result.

    rows: those of the `judged` that all metrics scored.
    human: mean by system.
    """

    judged: int
    rows: int
    segments: int
    systems: int
    draws: int
    human: dict[str, float | None]
    metrics: list[MetricStats]
    notes: list[str]


def baselines(translations: Sequence[JudgedTranslation]) -> list[MetricScores]:
    """Return the baselines: a constant, and the number of characters (fewer is better)."""
    no_spans: list[list[Span] | None] = [None] * len(translations)
    lengths: list[float | None] = [float(len(translation.mt)) for translation in translations]
    constant: list[float | None] = [0.0] * len(translations)
    return [
        MetricScores(CONSTANT, "the same score for all", True, constant, no_spans, {}),
        MetricScores(LENGTH, "characters, fewer is better", False, lengths, no_spans, {}),
    ]


def evaluate(
    translations: Sequence[JudgedTranslation],
    metrics: Sequence[MetricScores],
    *,
    draws: int,
    seed: int,
) -> MetaEvaluation:
    """Return every statistic of every metric and of the baselines.

    Raises UserError if the metrics have no translation in common, or all human scores are equal.
    """
    common = [
        number
        for number in range(len(translations))
        if all(metric.scores[number] is not None for metric in metrics)
    ]
    _check(common, translations, metrics)
    rows = _Rows([translations[number] for number in common])
    weights = {
        kind: agreement.resamples(kind, len(getattr(rows, kind)), draws, seed + k)
        for k, kind in enumerate(KINDS)
    }
    results: list[MetricStats] = []
    draws_by_metric: dict[str, dict[str, dict[str, Array]]] = {}
    baseline_metrics = baselines(translations)
    for metric in (*baseline_metrics, *metrics):
        result = MetricStats(
            name=metric.name,
            model=metric.model,
            is_baseline=metric in baseline_metrics,
            asked=len(translations),
            scored=sum(score is not None for score in metric.scores),
            failed=metric.failed,
            truncated=metric.truncated,
            repeated=metric.repeated,
        )
        scores = np.array([metric.scores[number] for number in common], float)
        matrix = rows.matrix(scores if metric.higher_is_better else -scores)
        draws_by_metric[metric.name] = _agreement(result, rows, matrix, weights)
        result.system_scores = rows.means(rows.matrix(scores))
        results.append(result)
        if metric.has_spans:
            _spans(result, rows, [metric.spans[number] for number in common], weights)
    for result in results:
        if not result.is_baseline:
            result.beyond = _beyond(draws_by_metric[result.name], draws_by_metric[LENGTH])
    if rows.has_spans:
        results.insert(2, _everything(rows, weights, len(translations)))
    return MetaEvaluation(
        judged=len(translations),
        rows=len(common),
        segments=len(rows.segments),
        systems=len(rows.systems),
        draws=draws,
        human=rows.means(rows.human),
        metrics=results,
        notes=_notes(rows, metrics),
    )


def _check(
    common: Sequence[int],
    translations: Sequence[JudgedTranslation],
    metrics: Sequence[MetricScores],
) -> None:
    for metric in metrics:
        if all(score is None for score in metric.scores):
            reasons = ", ".join(
                f"{type} {count:,}" for type, count in sorted(metric.failed.items())
            )
            raise UserError(
                f"{metric.name}: not one of {len(translations):,} has a score ({reasons})"
            )
    if not common:
        raise UserError("no translation has a score of every metric: leave one of them out")
    check_people([translations[number] for number in common])


def check_people(translations: Sequence[JudgedTranslation]) -> None:
    """Raise UserError if all human scores are equal."""
    if len({round(translation.score, 9) for translation in translations}) == 1:
        raise UserError(
            f"people give all {len(translations):,} translations the same score: "
            "nothing to agree with"
        )


class _Rows:
    """The common translations as matrices (segments, systems)."""

    def __init__(self, translations: list[JudgedTranslation]) -> None:
        self.translations = translations
        self.segments = list(dict.fromkeys(translation.segment for translation in translations))
        self.systems = sorted({translation.system for translation in translations})
        row_by_segment = {name: k for k, name in enumerate(self.segments)}
        self.row = np.array([row_by_segment[translation.segment] for translation in translations])
        self.column = np.array(
            [self.systems.index(translation.system) for translation in translations]
        )
        # Weights are multiples of 0.1: rounding errors of their sums are no differences.
        self.human = self.matrix(np.round([translation.score for translation in translations], 9))
        self.has_spans = any(
            rating.spans is not None
            for translation in translations
            for rating in translation.ratings
        )

    def matrix(self, values: Array) -> Array:
        """Return the values as (segments, systems), NaN where there is no translation."""
        result = np.full((len(self.segments), len(self.systems)), np.nan)
        result[self.row, self.column] = values
        return result

    def means(self, matrix: Array) -> dict[str, float | None]:
        """Return the mean by system."""
        return {name: _number(np.nanmean(matrix[:, k])) for k, name in enumerate(self.systems)}

    def summed(self, kind: str, values: Array) -> Array:
        """Return sums by segment or system of (translations, ...)."""
        indices = self.row if kind == "segments" else self.column
        result = np.zeros((len(getattr(self, kind)), *values.shape[1:]))
        np.add.at(result, indices, values)
        return result


def _agreement(
    result: MetricStats, rows: _Rows, matrix: Array, weights: dict[str, agreement.DrawWeights]
) -> dict[str, dict[str, Array]]:
    sums = agreement.Agreement(rows.human, matrix)
    full = sums.stats(agreement.ones("segments", len(rows.segments)))
    result.values |= {name: _number(value[0]) for name, value in full.items()}
    draws_by_kind = {kind: sums.stats(weights[kind]) for kind in KINDS}
    result.intervals |= {
        name: {kind: _interval(draws_by_kind[kind][name]) for kind in KINDS} for name in full
    }
    return draws_by_kind


def _spans(
    result: MetricStats,
    rows: _Rows,
    metric_spans: Sequence[list[Span] | None],
    weights: dict[str, agreement.DrawWeights],
) -> None:
    with_spans = [
        number for number, spans_of_row in enumerate(metric_spans) if spans_of_row is not None
    ]
    sums = spans.span_sums(
        [rows.translations[number] for number in with_spans],
        [metric_spans[number] or [] for number in with_spans],
    )
    if not sums.has_human_spans.any():
        return
    result.span_rows = int(sums.has_human_spans.sum())
    all_rows = np.zeros((len(metric_spans), sums.sums.shape[1]))
    all_rows[with_spans] = sums.sums
    for name, value in spans.compute_stats(all_rows.sum(0)).items():
        result.values[name] = _number(value)
    for kind in KINDS:
        values_by_name = spans.compute_stats(weights[kind].values @ rows.summed(kind, all_rows))
        for name, values in values_by_name.items():
            result.intervals.setdefault(name, {})[kind] = _interval(values)
    order = [("severity", name) for name in sorted({n for k, n in sums.groups if k == "severity"})]
    order += [("length", name) for name in spans.BINS if ("length", name) in sums.groups]
    for kind, name in order:
        group = sums.groups[kind, name]
        stats = {k: _number(v) for k, v in spans.compute_stats(group).items() if "f1" not in k}
        result.groups.append(_group(kind, name, group, stats))
    for name, chosen in rows_by_length(rows.translations):
        total = all_rows[chosen].sum(0)
        stats = {k: _number(v) for k, v in spans.compute_stats(total).items()}
        result.groups.append(_group("translation", name, total, stats))


def _group(kind: str, name: str, sums: Array, stats: dict[str, Any]) -> dict[str, Any]:
    return {"by": kind, "name": name, "found": float(sums[5]), "human": float(sums[7]), **stats}


def rows_by_length(translations: Sequence[JudgedTranslation]) -> list[tuple[str, Array]]:
    """Return quarters of the translations by length in characters: (name, mask)."""
    lengths = np.array([len(translation.mt) for translation in translations])
    edges = np.unique(np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1)).astype(int))
    result = []
    low = int(edges[0])
    for edge in edges[1:] if len(edges) > 1 else edges:
        result.append((f"{low}-{edge}", (lengths >= low) & (lengths <= edge)))
        low = int(edge) + 1
    return result


def _everything(rows: _Rows, weights: dict[str, agreement.DrawWeights], count: int) -> MetricStats:
    """Return the baseline of spans: each translation is one error from end to end."""
    result = MetricStats(EVERYTHING, "one span over each translation", True, count, count, {}, 0)
    full_spans: list[list[Span] | None] = [
        [Span(0, len(row.mt), "MAJOR")] if row.mt else [] for row in rows.translations
    ]
    _spans(result, rows, full_spans, weights)
    result.groups = [group for group in result.groups if group["by"] == "translation"]
    return result


def _beyond(
    draws_by_kind: dict[str, dict[str, Array]], baseline_draws: dict[str, dict[str, Array]]
) -> list[str]:
    names = []
    for name in agreement.STATS:
        low = [_interval(draws_by_kind[kind][name] - baseline_draws[kind][name]) for kind in KINDS]
        if all(interval is not None and interval[0] > 0 for interval in low):
            names.append(name)
    return names


def _interval(draws: Array) -> tuple[float, float] | None:
    """Return the 95 % percentile interval over the draws in which the value is defined.

    None if these are less than nine of ten."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < max(2, 0.9 * len(draws)):
        return None
    low, high = np.quantile(defined, (0.025, 0.975))
    return float(low), float(high)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _notes(rows: _Rows, metrics: Sequence[MetricScores]) -> list[str]:
    notes = []
    if len(rows.systems) == 1:
        notes.append("one system only: statistics that compare systems or translations are empty")
    if len(rows.segments) == 1:
        notes.append("one segment only: intervals over segments are meaningless")
    if not rows.has_spans:
        notes.append("no human spans: no span figures")
    silent = [metric.name for metric in metrics if rows.has_spans and not metric.has_spans]
    if silent:
        notes.append(f"no span figures of {', '.join(silent)}: its answers have no error_spans")
    return notes
