"""Compare agreement with scipy, values computed by hand and a search of all thresholds."""

from __future__ import annotations

import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, pearsonr

from scorekit.metaeval.agreement import Agreement, Concordance, DrawWeights, ones, resamples
from tests.kits.examples import examples


def _stats(human, metric):
    stats = Agreement(np.array(human, float), np.array(metric, float)).stats(
        ones("segments", len(human))
    )
    return {name: float(value[0]) for name, value in stats.items()}


@st.composite
def _scores(draw):
    """Generate two matrices with ties and with missing values at the same positions."""
    segments, systems = draw(st.integers(2, 6)), draw(st.integers(2, 5))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    levels = draw(st.sampled_from((2, 4, 1000)))
    human, metric = (rng.integers(0, n, (segments, systems)) / 7 for n in (4, levels))
    holes = rng.random(human.shape) < draw(st.sampled_from((0, 0.3)))
    holes[0, :2] = False
    return np.where(holes, np.nan, human), np.where(holes, np.nan, metric)


def _same(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(60))
@given(_scores())
def test_correlations_are_those_of_scipy(scores):
    human, metric = scores
    is_scored = ~np.isnan(human)
    stats = _stats(human, metric)
    _same(stats["kendall"], kendalltau(human[is_scored], metric[is_scored]).statistic)
    h, m = human[is_scored], metric[is_scored]
    varies = len(h) > 1 and np.ptp(h) > 0 and np.ptp(m) > 0
    _same(stats["pearson"], pearsonr(h, m).statistic if varies else np.nan)
    taus = [
        kendalltau(h[row], m[row]).statistic
        for h, m, row in zip(human, metric, is_scored, strict=True)
        if row.sum() > 1
    ]
    defined_taus = [tau for tau in taus if not np.isnan(tau)]
    _same(stats["kendall_item"], np.mean(defined_taus) if defined_taus else np.nan)


def _accuracy(human, metric, epsilon):
    """Compute acc_eq as Deutsch et al. describe it: the mean over segments."""
    shares = []
    for h, m in zip(human, metric, strict=True):
        pairs = [(a, b) for a, b in combinations(range(len(h)), 2) if not np.isnan(h[a] + h[b])]
        right = 0
        for a, b in pairs:
            order = 0 if abs(m[a] - m[b]) <= epsilon else np.sign(m[a] - m[b])
            right += order == np.sign(h[a] - h[b])
        if pairs:
            shares.append(right / len(pairs))
    return float(np.mean(shares)) if shares else np.nan


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(60))
@given(_scores())
def test_ties_are_calibrated_as_by_trying_every_threshold(scores):
    human, metric = scores
    stats = _stats(human, metric)
    distances = {0.0} | {
        abs(row[a] - row[b]) for row in metric for a, b in combinations(range(len(row)), 2)
    }
    tried = {e: _accuracy(human, metric, e) for e in distances if not np.isnan(e)}
    best = max(tried.values(), default=np.nan)
    _same(stats["acc_eq"], best)
    if not np.isnan(best):
        assert stats["epsilon"] == min(e for e, a in tried.items() if a > best - 1e-12)


def test_figures_worked_out_by_hand():
    human = [[0, -1, -5], [0, 0, -1]]
    metric = [[0.9, 0.8, 0.1], [0.5, 0.6, 0.7]]
    stats = _stats(human, metric)
    # first segment: equal order; second: a tie of raters and two reversed pairs
    assert stats["kendall_item"] == pytest.approx((1 - 2 / np.sqrt(2 * 3)) / 2)
    # a threshold of 0.1 ties (0.5, 0.6), correctly, but also (0.9, 0.8) and (0.6, 0.7)
    assert stats["acc_eq"] == pytest.approx((1 + 0) / 2)
    # means: raters 0, -0.5, -3; the metric 0.7, 0.7, 0.4, whose tie is wrong
    assert stats["system_accuracy"] == pytest.approx(2 / 3)
    means = pearsonr([0, -0.5, -3], [0.7, 0.7, 0.4]).statistic
    assert stats["system_pearson"] == pytest.approx(means)


def test_a_constant_gets_the_share_of_peoples_ties_and_no_correlation():
    stats = _stats([[0, 0, -1], [-1, -1, -1]], np.zeros((2, 3)))
    assert stats["acc_eq"] == pytest.approx((1 / 3 + 1) / 2) and stats["epsilon"] == 0
    assert stats["system_accuracy"] == 0
    assert all(np.isnan(stats[name]) for name in ("kendall", "kendall_item", "pearson"))


def test_one_system_has_no_figures_of_pairs():
    stats = _stats([[0], [-1], [-3]], [[0.3], [0.2], [0.1]])
    assert stats["kendall"] == pytest.approx(1) and stats["pearson"] > 0.9
    undefined = ("kendall_item", "acc_eq", "system_accuracy", "system_pearson")
    assert all(np.isnan(stats[name]) for name in undefined)


@pytest.mark.parametrize("by", ["segments", "systems"])
def test_a_weight_counts_as_the_row_or_column_again(by):
    """Compare the bootstrap's weighted sums with statistics of resampled tables."""
    rng = np.random.default_rng(3)
    human, metric = rng.integers(0, 4, (7, 5)) / 1.0, rng.normal(size=(7, 5))
    axis = 0 if by == "segments" else 1
    counts = resamples(by, human.shape[axis], 5, seed=1).values
    stats = Agreement(human, metric).stats(DrawWeights(by, counts))
    for draw, count in enumerate(counts.astype(int)):
        h, m = (np.repeat(x, count, axis) for x in (human, metric))
        expected = _stats(h, m)
        names = ["kendall", "pearson", "system_pearson", "system_accuracy"]
        if by == "segments":  # a system drawn twice is not compared with itself within a segment
            names += ["kendall_item", "acc_eq", "epsilon"]
        for name in names:
            _same(stats[name][draw], expected[name])


def test_a_resample_has_as_many_as_the_sample_and_the_seed_decides():
    first, repeated = (resamples("systems", 6, 50, seed=4).values for _ in range(2))
    assert (first == repeated).all() and (first.sum(1) == 6).all() and first.std() > 0
    assert not (first == resamples("systems", 6, 50, seed=5).values).all()


@settings(max_examples=examples(80))
@given(st.integers(1, 12), st.sampled_from([(1, 5), (2, 2), (4, 50), (50, 4)]), st.integers(0, 999))
def test_sums_are_those_over_all_pairs(n, levels, seed):
    rng = np.random.default_rng(seed)
    human, metric = (rng.integers(0, high, n) / 7 for high in levels)
    weights, groups = rng.integers(0, 4, (3, 5)).astype(float), rng.integers(0, 5, n)
    h, m = (np.sign(x[:, None] - x[None]) for x in (human, metric))
    for sums, products in zip(
        Concordance(human, metric).sums(weights, groups), (h * m, h**2, m**2), strict=True
    ):
        assert sums.tolist() == [row[groups] @ products @ row[groups] for row in weights]


@pytest.mark.filterwarnings("ignore")
def test_twenty_thousand_segments_need_little_memory_and_agree_with_scipy():
    """Check memory: 3 x 20,000 x 20,000 numbers would need 9.6 GB."""
    rng = np.random.default_rng(1)
    human = -rng.integers(0, 30, (20_000, 2)) / 2.0
    metric = rng.normal(size=human.shape).round(2) + human / 5
    tracemalloc.start()
    sums = Agreement(human, metric)
    (tau,) = sums.stats(ones("segments", 20_000))["kendall"]
    taus = sums.stats(resamples("segments", 20_000, 10, seed=0))["kendall"]
    _, max_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tau == pytest.approx(kendalltau(human.ravel(), metric.ravel()).statistic, abs=1e-12)
    assert abs(taus - tau).max() < 0.05
    assert max_bytes < 150e6
