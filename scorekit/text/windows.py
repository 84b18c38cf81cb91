"""Split parallel texts into parts side by side, and join parts to windows.

A border is a position in each of the texts (source, translation and, if there is one, reference). A
part reaches from one border to the next, so every character is in exactly one part.

Borders are ends of sentences that `align` finds to match, by the lengths of the sentences.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from scorekit.text.sentences import cut_near, sentence_starts

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

    sizes: of each part; one over `max_size` is a window by itself.
    empties: for each part, which of its texts are empty.
    Returns the part indexes where windows begin, and the number of parts.
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


#: Numbers of sentences in a bead, left and right, and its cost: table 5 of the paper.
_BEADS = (
    (1, 1, -math.log(0.89)),
    (1, 2, -math.log(0.089 / 2)),
    (2, 1, -math.log(0.089 / 2)),
    (2, 2, -math.log(0.011)),
    (1, 0, -math.log(0.0099 / 2)),
    (0, 1, -math.log(0.0099 / 2)),
)
#: Cost of the first sentence of an unmatched passage, and of each further one: from four on it is
#: cheaper than as many single ones. Tuned with `python -m bench.windows`.
_PASSAGE, _FURTHER = 13.0, 2.5
#: Variance of the difference per byte (the paper's, for characters of European languages).
_VARIANCE = 6.8
#: -log of the probability of a difference of k / _STEPS standard deviations or more.
_STEPS = 50
_COSTS = [-math.log(math.erfc(k / _STEPS / math.sqrt(2))) for k in range(37 * _STEPS)]
#: Words and figures that may be in both texts.
_ALIKE = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]{4,}")
_QUESTION_MARKS = ("?", "？", "؟")
_AFTER_MARKS = " \t\r\n\"'”’»）」』】)]"
#: Reduction of a pair's cost for a common word, for a question on both sides, and in total.
_WORD_BONUS, _QUESTION_BONUS, _MAX_BONUS = 2.5, 1.0, 10.0
#: A word in more sentences than this does not help to align them.
_COMMON = 3
#: Sentences on each side of the diagonal, besides the difference of the two counts.
_BAND = 24
#: Limits on sentences of a text, and on pairs; beyond them neighbors are joined, and the band gets
#: narrower.
_MAX_SENTENCES, _MAX_PAIRS = 1000, 60_000

#: A sentence that is so many times as long as the other text's longest has unmarked sentence ends.
#: The ratio of the texts is considered; a text that lacks a part has a misleading one.
_UNMARKED, _MIN_RATIO = 4, 0.5

#: Factors of the ratio of the two lengths, in case one text lacks a part.
_FACTORS = (1.0, 0.7, 0.5, 1.4, 2.0)

Bonus = dict[tuple[int, int], float]
#: Numbers of sentences of the left and of the right.
Bead = tuple[int, int]
#: Cost of a path that ends within a passage, and the passage's number of sentences.
Passage = tuple[float, int]
_NO_PASSAGE: Passage = (math.inf, 0)
#: Borders in sentences of the left and of the right.
Path = list[tuple[int, int]]


def align(left: str, right: str) -> list[tuple[int, int]]:
    """Return aligned borders (left, right) in ascending order, from (0, 0) to both ends.

    A dynamic program over sentences as that of Gale and Church (1993, "A Program for Aligning
    Sentences in Bilingual Corpora", Computational Linguistics 19(1), sections 3 and 4): a bead of m
    and n sentences lies between two borders, and costs -log P(match) - log P(delta | match), where
    delta is the difference of the two lengths in standard deviations. Differences from the paper:

    - lengths are UTF-8 bytes (a Chinese character says as much as three Latin ones), scaled by the
      ratio of the two texts, not of two languages; a text may lack a part, so several ratios are
      tried;
    - the deviation grows with the mean of both lengths, so the two sides are treated alike;
    - an unmatched sentence costs its prior but nothing for its length, so that a long one may be
      missing;
    - in a passage of unmatched sentences, each further one costs less than the first, because a
      text often lacks a whole part;
    - equal items on both sides (figures, names, question marks) make a pair likelier, as in
      Simard, Foster and Isabelle (1992, "Using Cognates to Align Sentences in Bilingual Corpora").

    Sentences far from the diagonal are skipped: the work grows linearly with the length of the
    texts.
    """
    texts = left, right
    starts = [_sentences(text) for text in texts]
    sizes = [_sizes(text, text_starts) for text, text_starts in zip(texts, starts, strict=True)]
    starts = [
        _split_unmarked(text, text_starts, size, other)
        for text, text_starts, size, other in zip(texts, starts, sizes, sizes[::-1], strict=True)
    ]
    units = [_units(text, text_starts) for text, text_starts in zip(texts, starts, strict=True)]
    sizes = [_sizes(text, text_starts) for text, text_starts in zip(texts, starts, strict=True)]
    path = _best(sizes[0], sizes[1], _shared_items(units[0], units[1]))
    return [(starts[0][i], starts[1][j]) for i, j in path]


def _sentences(text: str) -> list[int]:
    starts = sentence_starts(text)
    if len(starts) - 1 <= _MAX_SENTENCES:
        return starts
    min_chars = 2 * len(text) // _MAX_SENTENCES
    selected = [0]
    for start in starts[1:-1]:
        if start - selected[-1] >= min_chars:
            selected.append(start)
    return [*selected, len(text)]


def _units(text: str, starts: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise(starts)]


def _sizes(text: str, starts: Sequence[int]) -> list[int]:
    return [len(unit.strip().encode()) for unit in _units(text, starts)]


def _split_unmarked(
    text: str, starts: list[int], own_sizes: Sequence[int], other_sizes: Sequence[int]
) -> list[int]:
    """Split a text with unmarked sentence ends (Thai, lower case) into parts of the other's length.

    No bead has one sentence of one text and many of the other.
    own_sizes, other_sizes: in bytes."""
    if not sum(own_sizes) or not sum(other_sizes):
        return starts
    ratio = max(_MIN_RATIO, sum(own_sizes) / sum(other_sizes))
    longest, usual = max(other_sizes) * ratio, sum(other_sizes) / len(other_sizes) * ratio
    cut = [0]
    for (begin, end), size in zip(pairwise(starts), own_sizes, strict=True):
        count = round(size / usual) if size > _UNMARKED * longest else 1
        for k in range(1, count):
            position = cut_near(
                text, begin, end, begin + (end - begin) * k // count, 1 / (4 * count)
            )
            cut += [position] if cut[-1] < position < end else []
        cut.append(end)
    return cut


def _best(left: Sequence[int], right: Sequence[int], bonus: Bonus) -> Path:
    """Return the cheapest path over some ratios of the lengths, then over its own ratio.

    The ratio of the full texts is misleading if one of them stops half way."""
    full_ratio = sum(right) / sum(left) if sum(left) and sum(right) else 1.0
    cost, path = min(_cheapest(left, right, full_ratio * factor, bonus) for factor in _FACTORS)
    ratio = _ratio(path, left, right)
    if ratio is None:
        return path
    return min((cost, path), _cheapest(left, right, ratio, bonus))[1]


def _ratio(path: Path, left: Sequence[int], right: Sequence[int]) -> float | None:
    """Return the ratio of the lengths of sentences matched one to one; None without any."""
    pairs = [(left[i], right[j]) for (i, j), after in pairwise(path) if after == (i + 1, j + 1)]
    left_sum, right_sum = (sum(side) for side in zip(*pairs, strict=True)) if pairs else (0, 0)
    return right_sum / left_sum if left_sum and right_sum else None


def _shared_items(left: Sequence[str], right: Sequence[str]) -> Bonus:
    """Return the cost reduction of pairs of sentences that share a word or a question mark."""
    bonus: Bonus = defaultdict(float)
    word_indices: list[dict[str, set[int]]] = []
    for side in (left, right):
        words: dict[str, set[int]] = defaultdict(set)
        for k, unit in enumerate(side):
            for word in _ALIKE.findall(unit):
                words[word.lower()].add(k)
            if unit.rstrip(_AFTER_MARKS).endswith(_QUESTION_MARKS):
                words["?"].add(k)
        word_indices.append(words)
    for word in word_indices[0].keys() & word_indices[1].keys():
        left_indices, right_indices = word_indices[0][word], word_indices[1][word]
        if word == "?":
            if len(left_indices) * len(right_indices) <= 10_000:
                for pair in ((i, j) for i in left_indices for j in right_indices):
                    bonus[pair] += _QUESTION_BONUS
        elif len(left_indices) <= _COMMON and len(right_indices) <= _COMMON:
            for pair in ((i, j) for i in left_indices for j in right_indices):
                bonus[pair] += _WORD_BONUS / max(len(left_indices), len(right_indices))
    return bonus


def _cheapest(  # noqa: C901 - a call for each cell would cost more than the cell
    left: Sequence[int], right: Sequence[int], ratio: float, bonus: Bonus
) -> tuple[float, Path]:
    """Return the cost and the path of the cheapest row of beads from (0, 0) to both ends.

    ratio: of matched text, right to left; lengths are scaled to their geometric mean."""
    n = len(left)
    a, b = (
        list(accumulate((size * scale for size in sizes), initial=0.0))
        for sizes, scale in ((left, math.sqrt(ratio)), (right, 1 / math.sqrt(ratio)))
    )
    band = _band(a, b)
    min_cost: list[list[float]] = []
    last_bead: list[list[Bead]] = []  # the bead that ends here, by row and position in its band
    above: list[Passage] = []  # of the left, by position in the band of the previous row
    for i, row in enumerate(band):
        min_cost.append([math.inf] * len(row))
        last_bead.append([(0, 0)] * len(row))
        if i == 0:
            min_cost[0][0] = 0.0
        down, across = [_NO_PASSAGE] * len(row), _NO_PASSAGE
        for column, j in enumerate(row):
            best, which = min_cost[i][column], (0, 0)
            for di, dj, prior in _BEADS:
                before = j - dj - band[i - di].start if i >= di else -1
                if not 0 <= before < len(min_cost[i - di]):
                    continue
                cost = min_cost[i - di][before] + prior
                if cost - _MAX_BONUS >= best:
                    continue
                if di and dj:
                    left_size, right_size = a[i] - a[i - di], b[j] - b[j - dj]
                    cost += _mismatch(left_size, right_size)
                    if bonus:
                        cost -= _common(bonus, i, j, di, dj)
                if cost < best:
                    best, which = cost, (di, dj)
            if column:
                across = _longer(across, min_cost[i][column - 1])
                if across[0] < best:
                    best, which = across[0], (0, across[1])
            before = j - band[i - 1].start if i else -1
            if 0 <= before < len(above):
                down[column] = _longer(above[before], min_cost[i - 1][before])
                if down[column][0] < best:
                    best, which = down[column][0], (down[column][1], 0)
            min_cost[i][column], last_bead[i][column] = best, which
        above = down
    return min_cost[n][-1], _trace_back(last_bead, band)


def _longer(passage: Passage, before: float) -> Passage:
    """Return the cheapest passage with one more sentence: a longer one, or a new one.

    before: the cheapest path to its start."""
    further, first = passage[0] + _FURTHER, before + _PASSAGE
    return (further, passage[1] + 1) if further < first else (first, 1)


def _band(a: Sequence[float], b: Sequence[float]) -> list[range]:
    """Return the range of the right that is considered for each count of the left.

    It lies around two diagonals, of the sentence counts and of the lengths.
    a, b: cumulative lengths from 0. A row reaches to where the next one begins, so that a path
    exists."""
    n, m = len(a) - 1, len(b) - 1
    margin = min(_BAND + abs(n - m), max(_BAND, _MAX_PAIRS // (2 * n + 2)))
    marks = [(i * m // max(1, n), bisect_left(b, a[i], 0, m)) for i in range(n + 1)]
    low = [max(0, min(pair) - margin) for pair in marks]
    low[0] = 0
    high = [min(m, max(pair) + margin) for pair in marks]
    high[n] = m
    return [range(low[i], max(high[i], *low[i : i + 2]) + 1) for i in range(n + 1)]


def _mismatch(left_size: float, right_size: float) -> float:
    """Return -log of the probability that the lengths of matched text differ so much."""
    delta = abs(right_size - left_size) / math.sqrt(
        _VARIANCE * max(1.0, (left_size + right_size) / 2)
    )
    return _COSTS[min(len(_COSTS) - 1, int(delta * _STEPS))]


def _common(bonus: Bonus, i: int, j: int, di: int, dj: int) -> float:
    total = 0.0
    for k in range(i - di, i):
        for column in range(j - dj, j):
            total += bonus.get((k, column), 0.0)
    return min(total, _MAX_BONUS)


def _trace_back(last_bead: list[list[Bead]], band: list[range]) -> Path:
    """Return the path, with each sentence of a passage apart: it may be cut between any two."""
    i, j = len(band) - 1, band[-1][-1]
    path = [(i, j)]
    while (i, j) != (0, 0):
        di, dj = last_bead[i][j - band[i].start]
        path += [(i - k, j) for k in range(1, di)] if not dj else []
        path += [(i, j - k) for k in range(1, dj)] if not di else []
        i, j = i - di, j - dj
        path.append((i, j))
    return path[::-1]
