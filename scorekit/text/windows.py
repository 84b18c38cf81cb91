"""Texts that say the same, cut side by side into parts: where, and which parts go together.

A border is a position in each of the texts (source, translation and, if there is one, reference);
a part reaches from one border to the next, so that every character is in exactly one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from scorekit.text.alignment import align
from scorekit.text.cuts import cut_near

#: Of what alignment, cuts, `pack` and `surround` do: another one where any text may be cut, or any
#: window read, otherwise than before. Part of the cache's key.
REVISION = 3

Border = tuple[int, ...]
Part = tuple[Border, Border]
#: Sizes of parts; None of one that does not fit.
Measure = Callable[[list[Part]], list[int | None]]


def common_borders(texts: Sequence[str]) -> list[Border]:
    """Borders at ends of sentences that belong together, from all zeros to all lengths.

    texts: source, translation, and a reference or none. The translation is aligned to the source;
    so is the reference (to the translation, where the source is empty).
    """
    borders: list[Border] = list(align(texts[0], texts[1]))
    if len(texts) > 2:
        pivot = 0 if texts[0].strip() else 1
        known = align(texts[pivot], texts[2])
        third = _Follower(known, texts[2])
        borders = [(*border, third.position(border[pivot])) for border in borders]
        borders = [(0, 0, 0), *borders[1:-1], tuple(map(len, texts))]
    return list(dict.fromkeys(borders))


class _Follower:
    """Where a position of one text lies in another that was aligned to it."""

    def __init__(self, borders: Sequence[tuple[int, int]], text: str) -> None:
        self._ours = [ours for ours, _ in borders]
        self._theirs = [theirs for _, theirs in borders]
        self._text = text
        self._last = 0

    def position(self, at: int) -> int:
        """Of ascending positions, ascending ones: where there is no border, in proportion."""
        k = bisect_left(self._ours, at)
        if self._ours[k] == at:
            found = self._theirs[k]
        else:
            a, b = self._theirs[k - 1], self._theirs[k]
            share = (at - self._ours[k - 1]) / (self._ours[k] - self._ours[k - 1])
            found = cut_near(self._text, a, b, a + round((b - a) * share))
        self._last = max(self._last, found)
        return self._last


def halve(texts: Sequence[str], part: Part) -> Border | None:
    """A border about the middle of a part: at an end of a sentence, of a clause, at white space or
    between characters, whatever is near, and in the same share of each text. None where no text
    has two characters."""
    ranges = list(zip(*part, strict=True))
    first = max(range(len(texts)), key=lambda k: ranges[k][1] - ranges[k][0])
    a, b = ranges[first]
    if b - a < 2:
        return None
    middle = cut_near(texts[first], a, b, (a + b) // 2)
    share = (middle - a) / (b - a)
    return tuple(
        middle
        if k == first
        else cut_near(texts[k], start, end, start + round((end - start) * share))
        for k, (start, end) in enumerate(ranges)
    )


def pack(sizes: Sequence[int], empties: Sequence[Sequence[bool]], most: int) -> list[int]:
    """Neighbours joined into windows of at most `most` together: as few windows as there can be
    that lack one of the texts, then as few as there can be, then as equal as there can be.

    sizes: of each part; one over `most` is a window by itself. empties: of each part, which of its
    texts are empty. Returns where windows begin, as indexes of parts, and their number.
    """
    count = len(sizes)
    filled = [_sums(not empty for empty in column) for column in zip(*empties, strict=True)]
    filled = [sums for sums in filled if sums[-1]]  # a text that is empty throughout lacks nowhere
    totals = _sums(sizes)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    begins = [0]
    for end in range(1, count + 1):
        least: tuple[int, int, int] | None = None
        origin = end - 1
        for begin in range(end - 1, -1, -1):
            size = totals[end] - totals[begin]
            if size > most and begin < end - 1:
                break
            lacks = any(sums[end] == sums[begin] for sums in filled)
            before = best[begin]
            cost = (before[0] + lacks, before[1] + 1, before[2] + size * size)
            if least is None or cost < least:
                least, origin = cost, begin
        assert least is not None  # a part alone is always looked at
        best.append(least)
        begins.append(origin)
    kept = [count]
    while kept[-1]:
        kept.append(begins[kept[-1]])
    return kept[::-1]


def surround(sizes: Sequence[int], begin: int, end: int, most: int) -> tuple[int, int]:
    """Parts begin:end and the neighbours that still fit into `most` with them, as equal on both
    sides as can be: what one side does not use is the other's. Returns the first, and one past the
    last."""
    reach = [begin, end]
    room = most - sum(sizes[begin:end])
    taken = [0, 0]
    sides = [0, 1]
    while sides:
        side = min(sides, key=lambda k: taken[k])
        neighbour = reach[side] - (side == 0)
        if not 0 <= neighbour < len(sizes) or taken[0] + taken[1] + sizes[neighbour] > room:
            sides.remove(side)
            continue
        taken[side] += sizes[neighbour]
        reach[side] += 1 if side else -1
    return reach[0], reach[1]


def _sums(values: Iterator[int] | Sequence[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def refine(
    texts: Sequence[str],
    borders: Sequence[Border],
    measure: Callable[[list[Part]], list[int | None]],
) -> tuple[list[Border], list[int | None]]:
    """Borders between which every part fits, and the parts' sizes: what does not is halved, again
    and again. measure: sizes of parts, None of one that does not fit; None is left where a part
    cannot be cut any more."""
    known: dict[Part, int | None] = {}
    cut = list(borders)
    todo = list(pairwise(cut))
    while todo:
        known |= dict(zip(todo, measure(todo), strict=True))
        new: dict[Border, Border] = {}  # by the border before
        for part in todo:
            if known[part] is None and (middle := halve(texts, part)) not in (None, *part):
                assert middle is not None
                new[part[0]] = middle
        todo = []
        grown = []
        for border, after in pairwise(cut):
            grown.append(border)
            if border in new:
                grown.append(new[border])
                todo += [(border, new[border]), (new[border], after)]
        cut = [*grown, cut[-1]]
    return cut, [known[part] for part in pairwise(cut)]
