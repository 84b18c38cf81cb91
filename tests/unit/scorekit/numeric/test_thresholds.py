"""Check that a sum equal to a threshold counts as equal despite rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.numeric import above, below, lowest_equal

#: Decimals as people write them, from a thousandth on.
THOUSANDTHS = st.integers(-25_000, 25_000)


@given(st.lists(THOUSANDTHS, min_size=1, max_size=64), THOUSANDTHS)
def test_a_mean_of_decimals_is_compared_as_their_exact_mean(scores, border):
    floats, exact = [n / 1000 for n in scores], Fraction(sum(scores), len(scores))
    for mean in (sum(floats) / len(floats), math.fsum(floats) / len(floats)):
        assert above(mean, border / 1000) == (exact > border)
        assert below(mean, border / 1000) == (exact < border)


@given(THOUSANDTHS, st.lists(THOUSANDTHS, max_size=32))
def test_a_mean_that_is_its_border_is_neither_above_nor_below(border, steps):
    """Check steps up and down in pairs, whose mean is the threshold."""
    scores = [border] + [border + sign * step for step in steps for sign in (1, -1)]
    mean = sum(n / 1000 for n in scores) / len(scores)
    assert not above(mean, border / 1000) and not below(mean, border / 1000)


@pytest.mark.parametrize(
    ("value", "threshold"),
    [
        (sum([0.7] * 8) / 8, 0.7),
        (sum([0.1] * 8) / 8, 0.1),
        (sum([0.2, 0.4] * 4) / 8, 0.3),
        (0.1 + 0.2, 0.3),
        (7.0, 0.07 * 100),
        (0.4 * 1 + 0.5 * 0.6 + 0.1, 0.8),
    ],
)
def test_the_last_bit_of_a_float_decides_nothing(value, threshold):
    assert value != threshold
    assert not above(value, threshold) and not below(value, threshold)
    assert value >= lowest_equal(threshold)
    assert above(value + 1e-9, threshold) and below(value - 1e-9, threshold)


def test_arrays_have_the_same_border():
    values = np.array([0.3, 3.4 - 3.1, 0.2999])
    assert (values >= lowest_equal(0.3)).tolist() == [not below(x, 0.3) for x in values]
    assert (values >= lowest_equal(0.3)).tolist() == [True, True, False]
