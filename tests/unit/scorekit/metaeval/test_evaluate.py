"""Check intervals, stars and scored rows with invented judgements."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau

from scorekit.errors import UserError
from scorekit.metaeval.agreement import resamples
from scorekit.metaeval.evaluate import evaluate
from scorekit.metaeval.judgements import JudgedTranslation, Rating, Span
from scorekit.metaeval.metrics import MetricScores

SEGMENTS, SYSTEMS = 40, "ABCDEF"


def _judged(human):
    """Return judgements with random lengths.

    human: scores [segments, systems].
    """
    rng = np.random.default_rng(5)
    return [
        JudgedTranslation(system, str(k), f"s{k}", "m" * rng.integers(5, 50), ratings=[rating])
        for k, row in enumerate(human)
        for system, rating in zip(SYSTEMS, (Rating(float(x), None) for x in row), strict=False)
    ]


def _metric(scores, name="m", higher_is_better=True, failed=()):
    flat = [None if k in failed else float(x) for k, x in enumerate(np.ravel(scores))]
    return MetricScores(name, "model", higher_is_better, flat, [None] * len(flat), {})


def _evaluated(human, *metrics, seed=3):
    result = evaluate(_judged(human), metrics, draws=200, seed=seed)
    return {metric.name: metric for metric in result.metrics}


@pytest.fixture
def human():
    rng = np.random.default_rng(2)
    ability = np.arange(len(SYSTEMS)) / 2
    return -np.round(rng.exponential(3, (SEGMENTS, len(SYSTEMS))) + ability)


def test_an_interval_holds_95_of_100_resamples_and_the_seed_decides(human):
    scores = human + np.random.default_rng(4).normal(0, 3, human.shape)
    intervals = _evaluated(human, _metric(scores))["m"].intervals["kendall"]
    for k, kind in enumerate(("segments", "systems")):
        counts = resamples(kind, human.shape[k], 200, seed=3 + k).values.astype(int)
        taus = [
            kendalltau(*(np.repeat(x, count, k).ravel() for x in (human, scores))).statistic
            for count in counts
        ]
        assert intervals[kind] == pytest.approx(tuple(np.quantile(taus, (0.025, 0.975))))
    assert intervals == _evaluated(human, _metric(scores))["m"].intervals["kendall"]
    assert intervals != _evaluated(human, _metric(scores), seed=9)["m"].intervals["kendall"]


def test_a_star_says_that_a_metric_beats_the_length_and_not_only_nothing():
    """Check raters who prefer short texts: a length metric is above 0 but no better than length."""
    judged = _judged(np.zeros((SEGMENTS, len(SYSTEMS))))
    lengths = np.array([len(translation.mt) for translation in judged]).reshape(SEGMENTS, -1)
    human = -lengths + np.random.default_rng(6).normal(0, 10, lengths.shape)
    metrics = _evaluated(human, _metric(human / 2, "good"), _metric(-lengths, "ruler"))
    assert metrics["good"].beyond and metrics["ruler"].beyond == metrics["length only"].beyond == []
    assert metrics["ruler"].intervals["kendall"]["segments"][0] > 0


def test_a_star_needs_the_systems_too():
    """Check a metric that differs for one of two systems, which half of the resamples lack."""
    rng = np.random.default_rng(7)
    human = rng.normal(size=(SEGMENTS, 2))
    scores = np.stack([human[:, 0], rng.normal(size=SEGMENTS)], axis=1)
    metric = _evaluated(human, _metric(scores))["m"]
    assert metric.intervals["kendall"]["segments"][0] > 0 and "kendall" not in metric.beyond


def test_a_lower_is_better_metric_is_turned_and_its_means_are_shown_as_they_are(human):
    metric = _evaluated(human, _metric(-human, "errors", higher_is_better=False))["errors"]
    assert metric.values["kendall"] == pytest.approx(1) and metric.values["system_accuracy"] == 1
    assert metric.system_scores["A"] == pytest.approx(-human[:, 0].mean())


def test_a_failed_score_leaves_its_row_out_for_all_and_is_no_zero(human):
    scores = human - 10  # a 0 would be the best score
    metrics = _evaluated(
        human, _metric(scores, "a", failed=(3, 4)), _metric(scores, "b", failed=(9,))
    )
    assert (metrics["a"].scored, metrics["b"].scored, metrics["b"].asked) == (238, 239, 240)
    assert metrics["a"].values["kendall"] == metrics["b"].values["kendall"] == pytest.approx(1)


def test_equal_scores_for_all_have_no_correlation_and_no_star(human):
    metric = _evaluated(human, _metric(np.full(human.shape, 0.1)))["m"]
    undefined = ("kendall", "kendall_item", "pearson", "system_pearson")
    assert [metric.values[name] for name in undefined] == [None] * 4 and metric.beyond == []
    assert metric.values["system_accuracy"] == 0 and metric.intervals["kendall"]["segments"] is None


def test_an_interval_of_a_figure_that_most_resamples_lack_is_none():
    """Check two systems, whose resamples often have no pair of different systems."""
    human = np.random.default_rng(8).normal(size=(SEGMENTS, 2))
    metric = _evaluated(human, _metric(human))["m"]
    assert metric.values["system_accuracy"] == 1
    assert metric.intervals["system_accuracy"]["systems"] is None
    assert metric.intervals["system_accuracy"]["segments"] is not None


def test_a_segment_alone_has_its_pairs_and_a_translation_alone_is_refused():
    human = np.array([[0.0, -1.0]])
    metric = _evaluated(human, _metric(human))["m"]
    assert metric.values["kendall"] == metric.values["acc_eq"] == 1
    with pytest.raises(UserError, match="people give all 1 translations the same score"):
        evaluate(_judged([[0.0]]), [_metric([[0.5]])], draws=20, seed=0)
    with pytest.raises(UserError, match="no translation has a score of every metric"):
        scores = _metric(human, "a", failed=(0,)), _metric(human, "b", failed=(1,))
        evaluate(_judged(human), scores, draws=20, seed=0)


def test_the_baselines_are_what_they_say():
    """Check that short texts score higher by length and that `all marked` covers all errors."""
    texts = "mmmm", "mm", "m" * 8
    judged = [
        JudgedTranslation(name, "1", "s", mt, ratings=[Rating(-len(spans), spans)])
        for name, mt, spans in zip(
            "ABC", texts, ([Span(2, 4, "MINOR")], [], [Span(0, 1, "MINOR")] * 2), strict=True
        )
    ]
    metric_scores = _metric([0, 0, 1])
    metric_scores.spans = [[], [], []]
    metrics = {
        metric.name: metric
        for metric in evaluate(judged, [metric_scores], draws=20, seed=0).metrics
    }
    assert list(metrics) == ["constant", "length only", "all marked", "m"]
    assert (
        metrics["length only"].values["kendall"] == 1 and metrics["constant"].values["acc_eq"] == 0
    )
    marked = metrics["all marked"].values
    assert marked["chars_recall"] == 1 and marked["chars_precision"] == pytest.approx(3 / 14)
    assert marked["mpp_precision"] == pytest.approx((2 / 4 + 0 + 1 / 8) / 3)
