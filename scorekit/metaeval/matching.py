"""Match the spans of a metric with those of people, one to one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scorekit.metaeval.judgements import Span


def overlap(a: Span, b: Span) -> int:
    """Return the number of characters that both spans contain."""
    return max(0, min(a.end, b.end) - max(a.start, b.start))


def matched(predicted: Sequence[Span], gold: Sequence[Span]) -> list[tuple[int, int]]:
    """Return pairs (index in `predicted`, index in `gold`) of overlapping spans, each span once.

    They maximize the sum of the credits (overlap / length) for precision and recall."""
    if not predicted or not gold:
        return []
    credits = [
        [(o := overlap(f, g)) and o / (f.end - f.start) + o / (g.end - g.start) for g in gold]
        for f in predicted
    ]
    if len(predicted) <= len(gold):
        pairs = list(enumerate(_assigned(credits)))
    else:
        transposed = [list(column) for column in zip(*credits, strict=True)]
        pairs = [(f, g) for g, f in enumerate(_assigned(transposed))]
    return [(f, g) for f, g in pairs if credits[f][g] > 0]


def _assigned(worth: Sequence[Sequence[float]]) -> list[int]:
    """Return the column of each row that maximizes the sum; there are no more rows than columns.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987).
    """
    rows, columns = len(worth), len(worth[0])
    of_row, of_column = [0.0] * (rows + 1), [0.0] * (columns + 1)  # dual values; index 0 is unused
    row_of_column = [0] * (columns + 1)
    for row in range(1, rows + 1):
        row_of_column[0] = row
        column = 0
        min_cost, previous = [math.inf] * (columns + 1), [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while row_of_column[column]:
            seen[column] = True
            current, step, following = row_of_column[column], math.inf, 0
            for j in range(1, columns + 1):
                if seen[j]:
                    continue
                cost = -worth[current - 1][j - 1] - of_row[current] - of_column[j]
                if cost < min_cost[j]:
                    min_cost[j], previous[j] = cost, column
                if min_cost[j] < step:
                    step, following = min_cost[j], j
            for j in range(columns + 1):
                if seen[j]:
                    of_row[row_of_column[j]] += step
                    of_column[j] -= step
                else:
                    min_cost[j] -= step
            column = following
        while column:
            row_of_column[column] = row_of_column[previous[column]]
            column = previous[column]
    result = [0] * rows
    for column in range(1, columns + 1):
        if row_of_column[column]:
            result[row_of_column[column] - 1] = column - 1
    return result
