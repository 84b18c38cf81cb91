"""Compare a metric's spans with people's, by hand and with scipy's assignment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from scorekit.metaeval.judgements import JudgedTranslation, Rating, Span
from scorekit.metaeval.spans import BINS, compute_stats, length_bin, match_spans, overlap, span_sums


def _span(start, end, severity="MINOR"):
    return Span(start, end, severity)


def _sums(metric_spans, *people):
    translation = JudgedTranslation(
        "A", "1", "s", "m" * 60, ratings=[Rating(0.0, gold) for gold in people]
    )
    return span_sums([translation], [metric_spans])


def _stats(metric_spans, *people):
    return {
        name: float(v)
        for name, v in compute_stats(_sums(metric_spans, *people).sums.sum(0)).items()
    }


def test_characters_and_partial_credit_by_hand():
    # spans of 11 characters (5 correct) and 3 (all correct); raters mark 5, 3 and 10
    metric_spans = [_span(4, 15), _span(20, 23)]
    gold = [_span(4, 9), _span(20, 23), _span(30, 40)]
    stats = _stats(metric_spans, gold)
    assert stats["chars_precision"] == pytest.approx(8 / 14)
    assert stats["chars_recall"] == pytest.approx(8 / 18)
    p, r = (5 / 11 + 1) / 2, (1 + 1 + 0) / 3
    assert stats["mpp_precision"] == pytest.approx(p)
    assert stats["mpp_recall"] == pytest.approx(r)
    assert stats["mpp_f1"] == pytest.approx(2 * p * r / (p + r))


def test_one_long_span_stands_for_one_error_alone():
    stats = _stats([_span(0, 40)], [_span(0, 5), _span(10, 15), _span(20, 25), _span(30, 35)])
    assert stats["chars_recall"] == 1 and stats["mpp_recall"] == 0.25


def test_a_character_in_two_spans_counts_once():
    stats = _stats([_span(0, 10), _span(5, 10)], [_span(0, 10)])
    assert stats["chars_precision"] == stats["chars_recall"] == 1
    assert stats["mpp_precision"] == 0.5


def test_raters_are_compared_apart_with_a_part_each():
    stats = _stats([_span(0, 4)], [_span(0, 4)], [])
    assert stats["chars_precision"] == 0.5 and stats["chars_recall"] == 1


def test_a_translation_of_two_raters_weighs_as_one_of_one():
    """Check weights: both raters of the first row match 1 of 4 characters, the second's one all."""
    two_ratings, one_rating = ([Rating(0.0, [_span(0, 4)])] * n for n in (2, 1))
    rows = [
        JudgedTranslation("A", str(k), "s", "m" * 9, ratings=r)
        for k, r in enumerate((two_ratings, one_rating))
    ]
    stats = compute_stats(span_sums(rows, [[_span(0, 1)], [_span(0, 4)]]).sums.sum(0))
    assert stats["chars_recall"] == 5 / 8 and stats["mpp_recall"] == (1 / 4 + 1) / 2


def test_nothing_marked_is_no_precision_and_nothing_to_find_no_recall():
    silent = _stats([], [_span(0, 4)])
    assert np.isnan(silent["mpp_precision"]) and silent["mpp_recall"] == silent["mpp_f1"] == 0
    clean = _stats([_span(0, 4)], [])
    assert clean["mpp_precision"] == 0 and np.isnan(clean["mpp_recall"])
    assert np.isnan(clean["mpp_f1"])
    only_scored = JudgedTranslation("A", "1", "s", "m", ratings=[Rating(-1.0, None)])
    assert not span_sums([only_scored], [[]]).has_human_spans.any()


def test_groups_hold_the_metrics_spans_in_precision_and_peoples_in_recall():
    metric_spans, gold = (
        [_span(0, 4, "MAJOR"), _span(10, 30)],
        [_span(0, 8, "MAJOR"), _span(50, 52)],
    )
    groups = _sums(metric_spans, gold).groups
    major, minor = (compute_stats(groups["severity", name]) for name in ("MAJOR", "MINOR"))
    assert (major["chars_precision"], major["chars_recall"]) == (1, 0.5)
    assert (major["mpp_precision"], major["mpp_recall"]) == (1, 0.5)
    assert minor["chars_precision"] == minor["chars_recall"] == minor["mpp_recall"] == 0
    assert compute_stats(groups["length", "1-5"])["mpp_recall"] == 0
    assert groups["length", "16-40"][5] == 1 and groups["length", "6-15"][7] == 1


def test_every_length_has_one_bin():
    assert [length_bin(n) for n in (1, 5, 6, 15, 16, 40, 41, 10_000)] == [
        *("1-5", "1-5", "6-15", "6-15", "16-40", "16-40", "41+", "41+")
    ]
    assert BINS == ("1-5", "6-15", "16-40", "41+")


_SPANS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda s: _span(s[0], s[0] + s[1])),
    max_size=6,
)


@given(_SPANS, _SPANS)
def test_the_matching_is_worth_as_much_as_scipys(metric_spans, gold):
    def worth(f, g):
        shared = overlap(metric_spans[f], gold[g])
        return sum(shared / (span.end - span.start) for span in (metric_spans[f], gold[g]))

    pairs = match_spans(metric_spans, gold)
    table = np.array([[worth(f, g) for g in range(len(gold))] for f in range(len(metric_spans))])
    best = table[linear_sum_assignment(table, maximize=True)].sum() if table.size else 0
    assert sum(worth(f, g) for f, g in pairs) == pytest.approx(best)
    assert all(worth(f, g) > 0 for f, g in pairs)
    assert len({f for f, _ in pairs}) == len({g for _, g in pairs}) == len(pairs)


@given(_SPANS, _SPANS)
def test_precision_is_the_recall_of_the_other_way_round(metric_spans, gold):
    stats, swapped_stats = _stats(metric_spans, gold), _stats(gold, metric_spans)
    a, b = stats["chars_precision"], swapped_stats["chars_recall"]
    assert (np.isnan(a) and np.isnan(b)) or a == pytest.approx(b)

    def credit(values, spans, other_spans):
        p, r = np.nan_to_num(values["mpp_precision"]), np.nan_to_num(values["mpp_recall"])
        return p * len(spans) + r * len(other_spans)

    # Several matchings may have the same value but divide it differently.
    assert credit(stats, metric_spans, gold) == pytest.approx(
        credit(swapped_stats, gold, metric_spans)
    )
    assert all(np.isnan(stat) or 0 <= stat <= 1 + 1e-12 for stat in stats.values())
