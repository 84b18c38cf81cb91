"""Check which vectors are invalid and the cosines of valid ones."""

from __future__ import annotations

import math

import pytest

from scorekit.numeric import cosine, vector_error


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        ([0.0] * 8, "a vector of zeros"),
        ([-0.0, 0.0], "a vector of zeros"),
        ([3e-200, 0.0], "a vector of zeros"),
        ([], "a vector of zeros"),
        ([math.nan, 1.0], "a number of a vector is not finite"),
        ([math.inf, -math.inf], "a number of a vector is not finite"),
        ([1e200] * 4, "a number of a vector is too large"),
        ([0.0, 1e-3], ""),
        ([1e30, -1e30], ""),
    ],
)
def test_a_vector_has_a_direction(vector, reason):
    assert vector_error(vector) == reason


def test_cosines_stay_in_their_range_and_zeros_have_none():
    assert cosine([0.1] * 3, [0.1] * 3) == 1
    assert cosine([0.1, 0], [-3.0, 0]) == -1
    assert cosine([1, 0], [0, 5]) == 0
    for broken in ([0.0, 0.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="no cosine"):
            cosine(broken, [1.0, 0.0])
        with pytest.raises(ValueError, match="no cosine"):
            cosine([1.0, 0.0], broken)
