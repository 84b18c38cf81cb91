"""Compare numbers with the thresholds of a config without depending on the last bit of a float.

Eight scores of 0.7 have the mean 0.7, but as floats their sum divided by 8 is 0.7000000000000001,
which is above a threshold of 0.7. So a number this close to a threshold is equal to it.
"""

from __future__ import annotations

#: Relative to the threshold, or to 1 if that is larger. The mean of thousands of scores is off by
#: far less, and no two scores of a service are this close to each other.
SAME = 1e-12


def above(value: float, threshold: float) -> bool:
    """Return whether a number is above a threshold, by more than the error of a sum of floats."""
    return value > threshold + _error(threshold)


def below(value: float, threshold: float) -> bool:
    """Return whether a number is below a threshold, by more than the error of a sum of floats."""
    return value < lowest_equal(threshold)


def lowest_equal(threshold: float) -> float:
    """Return the smallest number that is not below a threshold, for arrays of numbers."""
    return threshold - _error(threshold)


def _error(threshold: float) -> float:
    return SAME * max(1.0, abs(threshold))
