"""Check bootstrap intervals and standard errors of paired differences against known statistics."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from scorekit.paired import (
    bootstrap_differences,
    mean_interval,
    paired_mean,
    paired_standard_error,
)


def paired(differences):
    """Return the [N, 2, 1] statistics of a mean with these paired differences."""
    return np.stack([np.zeros(len(differences)), differences], axis=1)[:, :, None]


def mean(sums, count):
    return sums[0] / count


def test_the_spread_of_the_draws_is_that_of_the_mean() -> None:
    """Compare with the exact bootstrap variance of a mean, s^2 / n with the biased s (Efron and
    Tibshirani, equation 5.12); 20,000 draws are within 2 %."""
    differences = np.random.default_rng(3).exponential(2.0, size=80)
    draws = bootstrap_differences(paired(differences), partial(mean, count=80), 20_000)
    assert draws.std() == pytest.approx(differences.std() / math.sqrt(80), rel=0.02)
    assert draws.mean() == pytest.approx(differences.mean(), abs=0.01)


def test_the_standard_error_of_paired_differences() -> None:
    """Check 1, 2, 3, 4: mean 2.5, s^2 = 5/3, error s / sqrt(4)."""
    difference = paired_standard_error([1.0, 2.0, 3.0, 4.0])
    assert difference.mean == 2.5
    assert difference.standard_error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert difference.errors == pytest.approx(2.5 / (math.sqrt(5 / 3) / 2))
    assert paired_standard_error([2.0]).errors is None
    assert paired_standard_error([0.0, 0.0]).errors == 0
    assert paired_standard_error([1.0, 1.0]).errors == math.inf
    with pytest.raises(ValueError, match="no differences"):
        paired_standard_error([])


def test_the_interval_of_a_mean_is_that_of_its_paired_stat() -> None:
    """Check a case by hand, too: equal differences have one value in each resample."""
    differences = np.random.default_rng(4).normal(0.2, 1.0, size=40).tolist()
    stat = paired_mean("", "", [(0.0, value) for value in differences], 0, higher=True)
    assert mean_interval(differences) == (stat.low, stat.high)
    assert mean_interval([0.5] * 12) == (0.5, 0.5)


def test_the_draws_are_those_of_one_call_of_the_generator() -> None:
    """Check the seed and the draws, on which recorded comparisons depend."""
    values = np.random.default_rng(4).normal(0.2, 1.0, size=40)
    indices = np.random.default_rng(0).integers(0, 40, (2000, 40))
    expected = np.quantile(values[indices].mean(axis=1), [0.025, 0.975])
    assert mean_interval(values.tolist()) == pytest.approx(expected, abs=1e-12)
