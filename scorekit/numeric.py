"""Compare numbers with the thresholds of a config, and check the vectors of texts.

Eight scores of 0.7 have the mean 0.7, but as floats their sum divided by 8 is 0.7000000000000001,
which is above a threshold of 0.7. So a number this close to a threshold is equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


#: A shorter vector has no direction: no model returns one, and a cosine would divide by 0.
MIN_LENGTH = 1e-12
#: The squares of a longer vector overflow.
MAX_LENGTH = 1e100


def vector_error(vector: Sequence[float]) -> str:
    """Return why these numbers cannot be the vector of a text, or "" if they can.

    A server that answers zeros is as broken as one that answers NaN: each cosine would be 0.
    """
    length = math.hypot(*vector)
    if not math.isfinite(length):
        return "a number of a vector is not finite"
    if length > MAX_LENGTH:
        return "a number of a vector is too large"
    return "a vector of zeros" if length < MIN_LENGTH else ""


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors, in [-1, 1].

    Raises ValueError for a vector of zeros, or with a number that is not finite."""
    if error := vector_error(first) or vector_error(second):
        raise ValueError(f"no cosine: {error}")
    length = math.sqrt(math.fsum(a * a for a in first) * math.fsum(b * b for b in second))
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return min(1.0, max(-1.0, dot / length))
