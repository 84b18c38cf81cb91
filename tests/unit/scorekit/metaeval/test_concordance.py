"""Check the count of pairs that two scores order equally, computed without visiting each pair."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from scorekit.metaeval.agreement import Agreement, ones, resamples
from scorekit.metaeval.concordance import Concordance
from tests.kits.examples import examples


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
