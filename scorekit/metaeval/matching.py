"""One to one: which span of a metric stands for which of people's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scorekit.metaeval.judgements import Span


def overlap(a: Span, b: Span) -> int:
    """Characters that both hold."""
    return max(0, min(a.end, b.end) - max(a.start, b.start))


def matched(found: Sequence[Span], gold: Sequence[Span]) -> list[tuple[int, int]]:
    """(place in `found`, place in `gold`) of the pairs that overlap, each span once, so that the
    sum of what they add to precision and recall (overlap by length of each) is largest."""
    if not found or not gold:
        return []
    worth = [
        [(o := overlap(f, g)) and o / (f.end - f.start) + o / (g.end - g.start) for g in gold]
        for f in found
    ]
    if len(found) <= len(gold):
        pairs = list(enumerate(_assigned(worth)))
    else:
        turned = [list(column) for column in zip(*worth, strict=True)]
        pairs = [(f, g) for g, f in enumerate(_assigned(turned))]
    return [(f, g) for f, g in pairs if worth[f][g] > 0]


def _assigned(worth: Sequence[Sequence[float]]) -> list[int]:
    """The column of each row that makes the sum largest; no more rows than columns.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987).
    """
    rows, columns = len(worth), len(worth[0])
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)  # dual values; place 0 is no one
    taken_by = [0] * (columns + 1)
    for row in range(1, rows + 1):
        taken_by[0] = row
        column = 0
        least, way = [math.inf] * (columns + 1), [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while taken_by[column]:
            seen[column] = True
            at, step, following = taken_by[column], math.inf, 0
            for j in range(1, columns + 1):
                if seen[j]:
                    continue
                cost = -worth[at - 1][j - 1] - of_row[at] - of_column[j]
                if cost < least[j]:
                    least[j], way[j] = cost, column
                if least[j] < step:
                    step, following = least[j], j
            for j in range(columns + 1):
                if seen[j]:
                    of_row[taken_by[j]] += step
                    of_column[j] -= step
                else:
                    least[j] -= step
            column = following
        while column:
            taken_by[column] = taken_by[way[column]]
            column = way[column]
    result = [0] * rows
    for column in range(1, columns + 1):
        if taken_by[column]:
            result[taken_by[column] - 1] = column - 1
    return result
