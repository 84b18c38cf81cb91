"""Check over many samples how often an interval holds the true difference."""

from __future__ import annotations

from functools import partial

import numpy as np

from scorekit.paired import bootstrap_differences, percentile_interval


def paired(differences):
    """Return the [N, 2, 1] statistics of a mean with these paired differences."""
    return np.stack([np.zeros(len(differences)), differences], axis=1)[:, :, None]


def mean(sums, count):
    return sums[0] / count


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    """Check coverage over 300 samples of a normal mean: 95 % within three deviations (the
    percentile interval is slightly too narrow at 60 sources)."""
    random = np.random.default_rng(5)
    num_covered = 0
    for _ in range(300):
        differences = random.normal(0.3, 1.0, size=60)
        draws = bootstrap_differences(paired(differences), partial(mean, count=60), 400)
        low, high = percentile_interval(draws)
        num_covered += bool(low <= 0.3 <= high)
    assert 0.90 <= num_covered / 300 <= 0.985
