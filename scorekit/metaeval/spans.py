"""Agreement of marked spans with human spans: by characters, and span by span.

`chars`: precision, recall and F1 of marked characters. A character in several spans counts once.
Long spans count more.

`mpp`: match with partial overlap and partial credit, micro-averaged (Perrella et al. 2026,
arXiv 2603.19921). Spans are matched one to one (`match_spans`); precision is the sum of
`overlap / length of the metric's span` over the matched ones, by the number of all spans of the
metric; recall that of `overlap / length of the human span`, by the number of all human spans; F1 is
their harmonic mean. Every span has equal weight, long or short. Specific to scorekit: the matching
maximizes the sum of both credits, spans of the source (omissions) are left out, and each of several
raters is compared separately, with 1 / raters of the weight.

Statistics are of the sums over all translations (micro-averages); without errors they are
undefined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scorekit.metaeval.judgements import JudgedTranslation, Span, each_rating

Array = Any

STATS = {
    "chars_precision": "character precision",
    "chars_recall": "character recall",
    "chars_f1": "character F1",
    "mpp_precision": "MPP precision",
    "mpp_recall": "MPP recall",
    "mpp_f1": "MPP F1",
}
#: Upper limits of the bins of spans by length in characters.
_LENGTHS = (5, 15, 40)


def length_bin(length: int) -> str:
    """Return the name of the bin of a span."""
    low = 1
    for high in _LENGTHS:
        if length <= high:
            return f"{low}-{high}"
        low = high + 1
    return f"{low}+"


BINS = (*(length_bin(high) for high in _LENGTHS), length_bin(_LENGTHS[-1] + 1))


@dataclass
class SpanSums:
    """Sums for span statistics.

    sums: (translations, 8), weighted over raters.
    has_human_spans: (translations,), whether there are human spans.
    groups: (kind, name) -> sums of the spans of that severity or length: the metric's spans for
    precision, human spans for recall."""

    sums: Array
    has_human_spans: Array
    groups: dict[tuple[str, str], Array] = field(default_factory=dict)


def span_sums(
    translations: Sequence[JudgedTranslation], predicted: Sequence[Sequence[Span]]
) -> SpanSums:
    """Return the sums.

    predicted: the metric's spans of each translation.
    """
    result = SpanSums(np.zeros((len(translations), 8)), np.zeros(len(translations), bool))
    for number, rating, weight in each_rating(list(translations)):
        result.has_human_spans[number] = True
        assert rating.spans is not None
        if predicted[number] or rating.spans:
            total, groups = _compare(predicted[number], rating.spans)
            result.sums[number] += weight * total
            for key, sums in groups.items():
                result.groups[key] = result.groups.get(key, 0.0) + weight * sums
    return result


def compute_stats(sums: Array) -> dict[str, Array]:
    """Return each of STATS from sums (..., 8); NaN if the divisor is 0."""
    common, common_gold, predicted, gold, credit_p, num_predicted, credit_r, num_gold = np.moveaxis(
        sums, -1, 0
    )
    stats: dict[str, Array] = {}
    for name, parts in {
        "chars": (common, predicted, common_gold, gold),
        "mpp": (credit_p, num_predicted, credit_r, num_gold),
    }.items():
        p, r = _ratio(parts[0], parts[1]), _ratio(parts[2], parts[3])
        stats |= {f"{name}_precision": p, f"{name}_recall": r}
        # Without any span of the metric its F1 is 0 if there are human spans.
        below = np.nan_to_num(p) + np.nan_to_num(r)
        f1 = np.where(
            below > 0, 2 * np.nan_to_num(p) * np.nan_to_num(r) / np.maximum(below, 1e-12), 0
        )
        stats[f"{name}_f1"] = np.where(parts[3] > 0, f1, np.nan)
    return stats


def _compare(
    predicted: Sequence[Span], gold: Sequence[Span]
) -> tuple[Array, dict[tuple[str, str], Array]]:
    end = max(span.end for span in (*predicted, *gold))
    by_metric, by_people = _covered(predicted, end), _covered(gold, end)
    groups: dict[tuple[str, str], Array] = {}
    for spans, other, k in ((predicted, by_people, 0), (gold, by_metric, 1)):
        for key in {key for span in spans for key in _keys(span)}:
            mask = _covered([span for span in spans if key in _keys(span)], end)
            sums = groups.setdefault(key, np.zeros(8))
            sums[k], sums[2 + k] = (mask & other).sum(), mask.sum()
            sums[5 + 2 * k] += sum(key in _keys(span) for span in spans)
    total = np.zeros(8)
    total[:4] = (common := (by_metric & by_people).sum()), common, by_metric.sum(), by_people.sum()
    total[5], total[7] = len(predicted), len(gold)
    for i, j in match_spans(predicted, gold):
        shared = overlap(predicted[i], gold[j])
        for span, column in ((predicted[i], 4), (gold[j], 6)):
            credit = shared / (span.end - span.start)
            total[column] += credit
            for key in _keys(span):
                groups[key][column] += credit
    return total, groups


def _keys(span: Span) -> tuple[tuple[str, str], ...]:
    return ("severity", span.severity), ("length", length_bin(span.end - span.start))


def _covered(spans: Sequence[Span], end: int) -> Array:
    mask = np.zeros(end, bool)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


def _ratio(above: Array, below: Array) -> Array:
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def overlap(a: Span, b: Span) -> int:
    """Return the number of characters that both spans contain."""
    return max(0, min(a.end, b.end) - max(a.start, b.start))


def match_spans(predicted: Sequence[Span], gold: Sequence[Span]) -> list[tuple[int, int]]:
    """Return pairs (index in `predicted`, index in `gold`) of overlapping spans, each span once.

    They maximize the sum of the credits (overlap / length) for precision and recall."""
    if not predicted or not gold:
        return []
    credits = [
        [(o := overlap(f, g)) and o / (f.end - f.start) + o / (g.end - g.start) for g in gold]
        for f in predicted
    ]
    if len(predicted) <= len(gold):
        pairs = list(enumerate(_assign(credits)))
    else:
        transposed = [list(column) for column in zip(*credits, strict=True)]
        pairs = [(f, g) for g, f in enumerate(_assign(transposed))]
    return [(f, g) for f, g in pairs if credits[f][g] > 0]


def _assign(worth: Sequence[Sequence[float]]) -> list[int]:
    """Return the column of each row that maximizes the sum; there are no more rows than columns.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987).
    """
    rows, columns = len(worth), len(worth[0])
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)  # dual values; index 0 is unused
    row_of_column = [0] * (columns + 1)
    for row in range(1, rows + 1):
        row_of_column[0] = row
        column = 0
        min_cost, previous = [math.inf] * (columns + 1), [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while row_of_column[column]:
            seen[column] = True
            current, step, following = row_of_column[column], math.inf, 0
            for j in range(1, columns + 1):
                if seen[j]:
                    continue
                cost = -worth[current - 1][j - 1] - of_row[current] - of_column[j]
                if cost < min_cost[j]:
                    min_cost[j], previous[j] = cost, column
                if min_cost[j] < step:
                    step, following = min_cost[j], j
            for j in range(columns + 1):
                if seen[j]:
                    of_row[row_of_column[j]] += step
                    of_column[j] -= step
                else:
                    min_cost[j] -= step
            column = following
        while column:
            row_of_column[column] = row_of_column[previous[column]]
            column = previous[column]
    result = [0] * rows
    for column in range(1, columns + 1):
        if row_of_column[column]:
            result[row_of_column[column] - 1] = column - 1
    return result
