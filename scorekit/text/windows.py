"""Split parallel texts into parts side by side, and join parts to windows.

A border is a position in each of the texts (source, translation and, if there is one, reference). A
part reaches from one border to the next, so every character is in exactly one part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from scorekit.text.alignment import align
from scorekit.text.cuts import cut_near

#: Version of alignment, cuts, `pack` and `add_context`: raise it when any text may be split, or any
#: window read, differently. Part of the cache's key.
REVISION = 4

Boundary = tuple[int, ...]
Part = tuple[Boundary, Boundary]
#: Returns the sizes of parts; None for one that does not fit.
Measure = Callable[[list[Part]], list[int | None]]


def common_boundaries(texts: Sequence[str]) -> list[Boundary]:
    """Return borders at matching ends of sentences, from all zeros to all lengths.

    texts: source, translation, and a reference or none. The translation is aligned to the source,
    and so is the reference (to the translation if the source is empty).
    """
    borders: list[Boundary] = list(align(texts[0], texts[1]))
    if len(texts) > 2:
        pivot = 0 if texts[0].strip() else 1
        aligned = align(texts[pivot], texts[2])
        follower = _Follower(aligned, texts[2])
        borders = [(*border, follower.position(border[pivot])) for border in borders]
        borders = [(0, 0, 0), *borders[1:-1], tuple(map(len, texts))]
    return list(dict.fromkeys(borders))


class _Follower:
    """Maps positions of one text to another that was aligned to it."""

    def __init__(self, borders: Sequence[tuple[int, int]], text: str) -> None:
        self._from = [position for position, _ in borders]
        self._to = [other for _, other in borders]
        self._text = text
        self._last = 0

    def position(self, position: int) -> int:
        """Map ascending positions to ascending ones; between borders, in proportion."""
        k = bisect_left(self._from, position)
        if self._from[k] == position:
            mapped = self._to[k]
        else:
            start, end = self._to[k - 1], self._to[k]
            share = (position - self._from[k - 1]) / (self._from[k] - self._from[k - 1])
            mapped = cut_near(self._text, start, end, start + round((end - start) * share))
        self._last = max(self._last, mapped)
        return self._last


def halve(texts: Sequence[str], part: Part) -> Boundary | None:
    """Return a border near the middle of a part, or None if no text has two characters.

    It is at an end of a sentence or clause, at white space or between characters, whatever is near,
    and at the same share of each text."""
    ranges = list(zip(*part, strict=True))
    first = max(range(len(texts)), key=lambda k: ranges[k][1] - ranges[k][0])
    start, end = ranges[first]
    if end - start < 2:
        return None
    middle = cut_near(texts[first], start, end, (start + end) // 2)
    share = (middle - start) / (end - start)
    return tuple(
        middle
        if k == first
        else cut_near(
            texts[k], other_start, other_end, other_start + round((other_end - other_start) * share)
        )
        for k, (other_start, other_end) in enumerate(ranges)
    )


def pack(sizes: Sequence[int], empties: Sequence[Sequence[bool]], max_size: int) -> list[int]:
    """Join neighboring parts to windows of at most `max_size`.

    There are as few windows as possible in which a text is empty, then as few windows as possible,
    then windows as equal as possible.

    sizes: of each part; one over `max_size` is a window by itself. empties: for each part, which of
    its texts are empty. Returns the part indexes where windows begin, and the number of parts.
    """
    count = len(sizes)
    columns = zip(*empties, strict=True)
    filled = [list(accumulate((not empty for empty in column), initial=0)) for column in columns]
    filled = [sums for sums in filled if sums[-1]]  # a text that is always empty does not count
    totals = list(accumulate(sizes, initial=0))
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    begins = [0]
    for end in range(1, count + 1):
        min_cost: tuple[int, int, int] | None = None
        origin = end - 1
        for begin in range(end - 1, -1, -1):
            size = totals[end] - totals[begin]
            if size > max_size and begin < end - 1:
                break
            lacks_text = any(sums[end] == sums[begin] for sums in filled)
            before = best[begin]
            cost = (before[0] + lacks_text, before[1] + 1, before[2] + size * size)
            if min_cost is None or cost < min_cost:
                min_cost, origin = cost, begin
        assert min_cost is not None  # a single part is always considered
        best.append(min_cost)
        begins.append(origin)
    begin_indexes = [count]
    while begin_indexes[-1]:
        begin_indexes.append(begins[begin_indexes[-1]])
    return begin_indexes[::-1]


def add_context(sizes: Sequence[int], begin: int, end: int, max_size: int) -> tuple[int, int]:
    """Add as many neighbor parts to parts begin:end as fit into `max_size`, equally on both sides.

    What one side does not use is the other's. Returns the first part, and one past the last."""
    reach = [begin, end]
    free = max_size - sum(sizes[begin:end])
    added = [0, 0]
    sides = [0, 1]
    while sides:
        side = min(sides, key=lambda k: added[k])
        neighbor = reach[side] - (side == 0)
        if not 0 <= neighbor < len(sizes) or added[0] + added[1] + sizes[neighbor] > free:
            sides.remove(side)
            continue
        added[side] += sizes[neighbor]
        reach[side] += 1 if side else -1
    return reach[0], reach[1]


def refine(
    texts: Sequence[str], borders: Sequence[Boundary], measure: Measure
) -> tuple[list[Boundary], list[int | None]]:
    """Return borders between which every part fits, and the sizes of the parts.

    Parts that do not fit are halved repeatedly; None remains if one cannot be split any more."""
    size_by_part: dict[Part, int | None] = {}
    current = list(borders)
    todo = list(pairwise(current))
    while todo:
        size_by_part |= dict(zip(todo, measure(todo), strict=True))
        new: dict[Boundary, Boundary] = {}  # by the border before
        for part in todo:
            if size_by_part[part] is None and (middle := halve(texts, part)) not in (None, *part):
                assert middle is not None
                new[part[0]] = middle
        todo = []
        refined = []
        for border, after in pairwise(current):
            refined.append(border)
            if border in new:
                refined.append(new[border])
                todo += [(border, new[border]), (new[border], after)]
        current = [*refined, current[-1]]
    return current, [size_by_part[part] for part in pairwise(current)]
