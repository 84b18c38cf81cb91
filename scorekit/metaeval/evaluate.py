"""All figures of all metrics on the rows that they have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scorekit.errors import UserError
from scorekit.metaeval import agreement, spans
from scorekit.metaeval.judgements import JudgedTranslation, Span
from scorekit.metaeval.metrics import MetricScores

Array = Any
KINDS = ("segments", "systems")
#: The figures that no metric should fall behind.
CONSTANT, LENGTH, EVERYTHING = "constant", "length only", "all marked"


@dataclass
class MetricFigures:
    """values, intervals: figure -> number, and kind of bootstrap -> (low, high); None where it is
    not defined. beyond: figures that lie above the length-only metric's in 97.5 % of the draws of
    both kinds (paired: the same draws). span_rows: translations that its span figures are of."""

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


@dataclass
class MetaEvaluation:
    """rows: translations that all metrics have a score of, of `judged`. human: mean by system."""

    judged: int
    rows: int
    segments: int
    systems: int
    draws: int
    human: dict[str, float | None]
    metrics: list[MetricFigures]
    notes: list[str]


def baselines(translations: Sequence[JudgedTranslation]) -> list[MetricScores]:
    """A constant; the number of characters, fewer being better."""
    none: list[list[Span] | None] = [None] * len(translations)
    lengths: list[float | None] = [float(len(one.mt)) for one in translations]
    constant: list[float | None] = [0.0] * len(translations)
    return [
        MetricScores(CONSTANT, "the same score for all", True, constant, none, {}),
        MetricScores(LENGTH, "characters, fewer is better", False, lengths, none, {}),
    ]


def evaluate(
    translations: Sequence[JudgedTranslation],
    metrics: Sequence[MetricScores],
    *,
    draws: int,
    seed: int,
    on_done: Callable[[str], None] = lambda name: None,
) -> MetaEvaluation:
    """Every figure of every metric, and of the baselines.

    Raises UserError where the metrics have no translation in common, or people make no difference.
    """
    kept = [
        number
        for number in range(len(translations))
        if all(metric.scores[number] is not None for metric in metrics)
    ]
    _check(kept, translations, metrics)
    rows = _Rows([translations[number] for number in kept])
    weights = {
        kind: agreement.resamples(kind, len(getattr(rows, kind)), draws, seed + k)
        for k, kind in enumerate(KINDS)
    }
    found: list[MetricFigures] = []
    drawn: dict[str, dict[str, dict[str, Array]]] = {}
    base = baselines(translations)
    for metric in (*base, *metrics):
        one = MetricFigures(
            name=metric.name,
            model=metric.model,
            is_baseline=metric in base,
            asked=len(translations),
            scored=sum(score is not None for score in metric.scores),
            failed=metric.failed,
            truncated=metric.truncated,
        )
        scores = np.array([metric.scores[number] for number in kept], float)
        own = rows.matrix(scores if metric.higher_is_better else -scores)
        drawn[metric.name] = _agreement(one, rows, own, weights)
        one.system_scores = rows.means(rows.matrix(scores))
        found.append(one)
        if metric.has_spans:
            _spans(one, rows, [metric.spans[number] for number in kept], weights)
        on_done(metric.name)
    for one in found:
        one.beyond = _beyond(drawn[one.name], drawn[LENGTH]) if not one.is_baseline else []
    if rows.has_spans:
        found.insert(2, _everything(rows, weights, len(translations)))
    return MetaEvaluation(
        judged=len(translations),
        rows=len(kept),
        segments=len(rows.segments),
        systems=len(rows.systems),
        draws=draws,
        human=rows.means(rows.human),
        metrics=found,
        notes=_notes(rows, metrics),
    )


def _check(
    kept: Sequence[int], translations: Sequence[JudgedTranslation], metrics: Sequence[MetricScores]
) -> None:
    for metric in metrics:
        if all(score is None for score in metric.scores):
            why = ", ".join(f"{type} {count:,}" for type, count in sorted(metric.failed.items()))
            raise UserError(f"{metric.name}: not one of {len(translations):,} has a score ({why})")
    if not kept:
        raise UserError("no translation has a score of every metric: leave one of them out")
    check_people([translations[number] for number in kept])


def check_people(translations: Sequence[JudgedTranslation]) -> None:
    """Raise UserError where people make no difference between any of them."""
    if len({round(one.score, 9) for one in translations}) == 1:
        raise UserError(
            f"people give all {len(translations):,} translations the same score: "
            "nothing to agree with"
        )


class _Rows:
    """The common translations as matrices."""

    def __init__(self, translations: list[JudgedTranslation]) -> None:
        self.translations = translations
        self.segments = list(dict.fromkeys(one.segment for one in translations))
        self.systems = sorted({one.system for one in translations})
        places = {name: k for k, name in enumerate(self.segments)}
        self.row = np.array([places[one.segment] for one in translations])
        self.column = np.array([self.systems.index(one.system) for one in translations])
        # weights of a tenth: what rounding leaves of their sums is no difference
        self.human = self.matrix(np.round([one.score for one in translations], 9))
        self.has_spans = any(r.spans is not None for one in translations for r in one.ratings)

    def matrix(self, values: Array) -> Array:
        """(segments, systems), NaN where there is no translation."""
        result = np.full((len(self.segments), len(self.systems)), np.nan)
        result[self.row, self.column] = values
        return result

    def means(self, matrix: Array) -> dict[str, float | None]:
        """By system."""
        return {name: _number(np.nanmean(matrix[:, k])) for k, name in enumerate(self.systems)}

    def summed(self, kind: str, values: Array) -> Array:
        """(translations, ...) -> sums by segment or system."""
        at = self.row if kind == "segments" else self.column
        result = np.zeros((len(getattr(self, kind)), *values.shape[1:]))
        np.add.at(result, at, values)
        return result


def _agreement(
    one: MetricFigures, rows: _Rows, own: Array, weights: dict[str, agreement.DrawWeights]
) -> dict[str, dict[str, Array]]:
    sums = agreement.Agreement(rows.human, own)
    whole = sums.figures(agreement.ones("segments", len(rows.segments)))
    one.values |= {name: _number(value[0]) for name, value in whole.items()}
    drawn = {kind: sums.figures(weights[kind]) for kind in KINDS}
    one.intervals |= {
        name: {kind: _interval(drawn[kind][name]) for kind in KINDS} for name in whole
    }
    return drawn


def _spans(
    one: MetricFigures,
    rows: _Rows,
    found: Sequence[list[Span] | None],
    weights: dict[str, agreement.DrawWeights],
) -> None:
    known = [number for number, marked in enumerate(found) if marked is not None]
    sums = spans.span_sums(
        [rows.translations[number] for number in known], [found[number] or [] for number in known]
    )
    if not sums.known.any():
        return
    one.span_rows = int(sums.known.sum())
    all_rows = np.zeros((len(found), sums.sums.shape[1]))
    all_rows[known] = sums.sums
    for name, value in spans.figures_of(all_rows.sum(0)).items():
        one.values[name] = _number(value)
    for kind in KINDS:
        drawn = spans.figures_of(weights[kind].values @ rows.summed(kind, all_rows))
        for name, values in drawn.items():
            one.intervals.setdefault(name, {})[kind] = _interval(values)
    order = [("severity", name) for name in sorted({n for k, n in sums.groups if k == "severity"})]
    order += [("length", name) for name in spans.BINS if ("length", name) in sums.groups]
    for kind, name in order:
        group = sums.groups[kind, name]
        figures = {k: _number(v) for k, v in spans.figures_of(group).items() if "f1" not in k}
        one.groups.append(_group(kind, name, group, figures))
    for name, chosen in rows_by_length(rows.translations):
        total = all_rows[chosen].sum(0)
        figures = {k: _number(v) for k, v in spans.figures_of(total).items()}
        one.groups.append(_group("translation", name, total, figures))


def _group(kind: str, name: str, sums: Array, figures: dict[str, Any]) -> dict[str, Any]:
    return {"by": kind, "name": name, "found": float(sums[5]), "human": float(sums[7]), **figures}


def rows_by_length(translations: Sequence[JudgedTranslation]) -> list[tuple[str, Array]]:
    """Quarters of the translations by their length in characters: (name, which)."""
    lengths = np.array([len(one.mt) for one in translations])
    edges = np.unique(np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1)).astype(int))
    result = []
    low = int(edges[0])
    for edge in edges[1:] if len(edges) > 1 else edges:
        result.append((f"{low}-{edge}", (lengths >= low) & (lengths <= edge)))
        low = int(edge) + 1
    return result


def _everything(
    rows: _Rows, weights: dict[str, agreement.DrawWeights], asked: int
) -> MetricFigures:
    """The baseline of spans: each translation is one error from end to end."""
    one = MetricFigures(EVERYTHING, "one span over each translation", True, asked, asked, {}, 0)
    whole: list[list[Span] | None] = [
        [Span(0, len(row.mt), "MAJOR")] if row.mt else [] for row in rows.translations
    ]
    _spans(one, rows, whole, weights)
    one.groups = [group for group in one.groups if group["by"] == "translation"]
    return one


def _beyond(own: dict[str, dict[str, Array]], base: dict[str, dict[str, Array]]) -> list[str]:
    found = []
    for name in agreement.FIGURES:
        low = [_interval(own[kind][name] - base[kind][name]) for kind in KINDS]
        if all(interval is not None and interval[0] > 0 for interval in low):
            found.append(name)
    return found


def _interval(drawn: Array) -> tuple[float, float] | None:
    """95 % by percentiles, of the draws in which it is defined; None where those are less than
    nine of ten."""
    known = drawn[~np.isnan(drawn)]
    if len(known) < max(2, 0.9 * len(drawn)):
        return None
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _notes(rows: _Rows, metrics: Sequence[MetricScores]) -> list[str]:
    notes = []
    if len(rows.systems) == 1:
        notes.append(
            "one system only: what compares systems, or translations of a segment, is empty"
        )
    if len(rows.segments) == 1:
        notes.append("one segment only: intervals over segments say nothing")
    if not rows.has_spans:
        notes.append("no human spans: no span figures")
    silent = [metric.name for metric in metrics if rows.has_spans and not metric.has_spans]
    if silent:
        notes.append(f"no span figures of {', '.join(silent)}: its answers have no error_spans")
    return notes
