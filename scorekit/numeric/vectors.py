"""What a vector of a text has to be, and how alike two of them are."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A vector that is shorter has no direction: no model gives one, and a cosine would divide by 0.
LEAST_LENGTH = 1e-12
#: A vector that is longer has squares beyond the numbers of a machine.
MOST_LENGTH = 1e100


def vector_fault(vector: Sequence[float]) -> str:
    """Return why these numbers are no vector of a text, or "" where they are.

    A server that answers zeros is as broken as one that answers NaN: each cosine would be 0.
    """
    length = math.hypot(*vector)
    if not math.isfinite(length):
        return "a number of a vector is not finite"
    if length > MOST_LENGTH:
        return "a number of a vector is too large"
    return "a vector of zeros" if length < LEAST_LENGTH else ""


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors, in [-1, 1]. Raise ValueError if one of them is no vector:
    zeros, or a number that is not finite."""
    if fault := vector_fault(one) or vector_fault(other):
        raise ValueError(f"no cosine: {fault}")
    length = math.sqrt(math.fsum(x * x for x in one) * math.fsum(y * y for y in other))
    dot = math.fsum(x * y for x, y in zip(one, other, strict=True))
    return min(1.0, max(-1.0, dot / length))
