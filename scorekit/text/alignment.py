"""Which sentences of a translation stand for which of its source, by their lengths.

A dynamic programme over sentences as that of Gale and Church (1993, "A Program for Aligning
Sentences in Bilingual Corpora", Computational Linguistics 19(1), sections 3 and 4): a bead of m
and n sentences costs -log P(match) - log P(delta | match), where delta is the difference of the two
lengths in standard deviations. It departs from the paper in this:

- lengths are UTF-8 bytes (a Chinese character says as much as three Latin ones), scaled by the
  texts' own ratio, not by that of two languages; a text may lack a part, so several are tried;
- the deviation grows with the mean of both lengths, so that neither side is the one to divide by;
- a sentence that stands alone costs its prior and no length: else no long one could be missing;
- of several in a row that stand alone, a passage, each further one costs less than the first: what
  one text lacks is often a whole part of it;
- what is written alike on both sides (figures, names, question marks) makes a pair likelier, as in
  Simard, Foster and Isabelle (1992, "Using Cognates to Align Sentences in Bilingual Corpora").

Sentences far from the diagonal are not looked at: the work grows with the length of the texts.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from scorekit.text.cuts import cut_near
from scorekit.text.sentences import sentence_starts

#: Beads of sentences of the left and of the right, and what each costs: table 5 of the paper.
_BEADS = (
    (1, 1, -math.log(0.89)),
    (1, 2, -math.log(0.089 / 2)),
    (2, 1, -math.log(0.089 / 2)),
    (2, 2, -math.log(0.011)),
    (1, 0, -math.log(0.0099 / 2)),
    (0, 1, -math.log(0.0099 / 2)),
)
#: The first sentence of a passage that stands alone, and each further one: from four on it is
#: cheaper than as many single ones. Set by `python -m bench.windows`, not by a count.
_PASSAGE, _FURTHER = 13.0, 2.5
#: Variance of the difference for each byte (the paper's, for characters of European languages).
_VARIANCE = 6.8
#: -log of the chance of a difference of k / _STEPS standard deviations or more.
_STEPS = 50
_COSTS = [-math.log(math.erfc(k / _STEPS / math.sqrt(2))) for k in range(37 * _STEPS)]
#: Words and figures that may stand in both texts.
_ALIKE = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]{4,}")
_QUESTION_MARKS = ("?", "？", "؟")
_AFTER_MARKS = " \t\r\n\"'”’»）」』】)]"
#: What a common word, or a question on both sides, takes off the cost of a pair, and all together.
_WORD_BONUS, _QUESTION_BONUS, _MOST_BONUS = 2.5, 1.0, 10.0
#: A word that stands in more sentences than this says little of where.
_COMMON = 3
#: Sentences on each side of the diagonal, beside the difference of their numbers.
_BAND = 24
#: Most sentences of a text, and most pairs that are looked at; beyond, neighbours are joined, and
#: the band gets narrower.
_MOST_SENTENCES, _MOST_PAIRS = 1000, 60_000

#: A sentence that is so many times as long as the other text's longest is none, the texts' ratio
#: taken into account; a text that lacks a part has a ratio that says little.
_UNMARKED, _LEAST_RATIO = 4, 0.5

#: By what the ratio of the two texts' lengths is off, where one of them lacks a part.
_FACTORS = (1.0, 0.7, 0.5, 1.4, 2.0)

Bonus = dict[tuple[int, int], float]
#: How many sentences of the left and of the right.
Bead = tuple[int, int]
#: What a path costs that ends within one, and how many sentences of it there are.
Passage = tuple[float, int]
_NO_PASSAGE: Passage = (math.inf, 0)
#: Borders in sentences of the left and of the right.
Path = list[tuple[int, int]]


def align(left: str, right: str) -> list[tuple[int, int]]:
    """Borders (of left, of right) that belong together, from (0, 0) to both ends, each no earlier
    than the one before: between two of them stands a bead."""
    texts = left, right
    starts = [_sentences(text) for text in texts]
    sizes = [_sizes(text, own) for text, own in zip(texts, starts, strict=True)]
    starts = [
        _finer(text, own, size, other)
        for text, own, size, other in zip(texts, starts, sizes, sizes[::-1], strict=True)
    ]
    units = [_units(text, own) for text, own in zip(texts, starts, strict=True)]
    sizes = [_sizes(text, own) for text, own in zip(texts, starts, strict=True)]
    path = _best(sizes[0], sizes[1], _alike(units[0], units[1]))
    return [(starts[0][i], starts[1][j]) for i, j in path]


def _sentences(text: str) -> list[int]:
    starts = sentence_starts(text)
    if len(starts) - 1 <= _MOST_SENTENCES:
        return starts
    least = 2 * len(text) // _MOST_SENTENCES
    kept = [0]
    for start in starts[1:-1]:
        if start - kept[-1] >= least:
            kept.append(start)
    return [*kept, len(text)]


def _units(text: str, starts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise(starts)]


def _sizes(text: str, starts: Sequence[int]) -> list[int]:
    return [len(unit.strip().encode()) for unit in _units(text, starts)]


def _finer(text: str, starts: list[int], own: Sequence[int], other: Sequence[int]) -> list[int]:
    """A text whose ends of sentences are not marked (Thai, lower case) is cut into pieces of about
    the other's sentences: no bead has one of this and many of that. own, other: sizes."""
    if not sum(own) or not sum(other):
        return starts
    ratio = max(_LEAST_RATIO, sum(own) / sum(other))
    longest, usual = max(other) * ratio, sum(other) / len(other) * ratio
    cut = [0]
    for (begin, end), size in zip(pairwise(starts), own, strict=True):
        count = round(size / usual) if size > _UNMARKED * longest else 1
        for k in range(1, count):
            at = cut_near(text, begin, end, begin + (end - begin) * k // count, 1 / (4 * count))
            cut += [at] if cut[-1] < at < end else []
        cut.append(end)
    return cut


def _best(left: Sequence[int], right: Sequence[int], bonus: Bonus) -> Path:
    """The cheapest path over some ratios of the lengths: a text that stops half way says little of
    the ratio of what stands in both. The best one's own pairs then tell the ratio better."""
    whole = sum(right) / sum(left) if sum(left) and sum(right) else 1.0
    cost, path = min(_cheapest(left, right, whole * factor, bonus) for factor in _FACTORS)
    ratio = _ratio(path, left, right)
    if ratio is None:
        return path
    return min((cost, path), _cheapest(left, right, ratio, bonus))[1]


def _ratio(path: Path, left: Sequence[int], right: Sequence[int]) -> float | None:
    """That of all the lengths of sentences that stand one for one; None where none do."""
    ones = [(left[i], right[j]) for (i, j), after in pairwise(path) if after == (i + 1, j + 1)]
    ours, theirs = (sum(side) for side in zip(*ones, strict=True)) if ones else (0, 0)
    return theirs / ours if ours and theirs else None


def _alike(left: Sequence[str], right: Sequence[str]) -> Bonus:
    """What pairs of sentences that have something in common cost less."""
    found: Bonus = defaultdict(float)
    where: list[dict[str, set[int]]] = []
    for side in (left, right):
        words: dict[str, set[int]] = defaultdict(set)
        for k, unit in enumerate(side):
            for word in _ALIKE.findall(unit):
                words[word.lower()].add(k)
            if unit.rstrip(_AFTER_MARKS).endswith(_QUESTION_MARKS):
                words["?"].add(k)
        where.append(words)
    for word in where[0].keys() & where[1].keys():
        ours, theirs = where[0][word], where[1][word]
        if word == "?":
            if len(ours) * len(theirs) <= 10_000:
                for pair in ((i, j) for i in ours for j in theirs):
                    found[pair] += _QUESTION_BONUS
        elif len(ours) <= _COMMON and len(theirs) <= _COMMON:
            for pair in ((i, j) for i in ours for j in theirs):
                found[pair] += _WORD_BONUS / max(len(ours), len(theirs))
    return found


def _cheapest(
    left: Sequence[int], right: Sequence[int], ratio: float, bonus: Bonus
) -> tuple[float, Path]:
    """The cheapest row of beads from (0, 0) to both ends, and what it costs. ratio: of what stands
    for the same, right to left; lengths are brought to their geometric mean."""
    n = len(left)
    a, b = _sums(left, math.sqrt(ratio)), _sums(right, 1 / math.sqrt(ratio))
    band = _band(a, b)
    least: list[list[float]] = []
    came: list[list[Bead]] = []  # which ends here, by row and place in its band
    above: list[Passage] = []  # of the left, by place in the band of the row before
    for i, row in enumerate(band):
        least.append([math.inf] * len(row))
        came.append([(0, 0)] * len(row))
        if i == 0:
            least[0][0] = 0.0
        down, across = [_NO_PASSAGE] * len(row), _NO_PASSAGE
        for at, j in enumerate(row):
            best, which = least[i][at], (0, 0)
            for di, dj, prior in _BEADS:
                before = j - dj - band[i - di].start if i >= di else -1
                if not 0 <= before < len(least[i - di]):
                    continue
                cost = least[i - di][before] + prior
                if cost - _MOST_BONUS >= best:
                    continue
                if di and dj:
                    ours, theirs = a[i] - a[i - di], b[j] - b[j - dj]
                    cost += _mismatch(ours, theirs)
                    if bonus:
                        cost -= _common(bonus, i, j, di, dj)
                if cost < best:
                    best, which = cost, (di, dj)
            if at:
                across = _longer(across, least[i][at - 1])
                if across[0] < best:
                    best, which = across[0], (0, across[1])
            before = j - band[i - 1].start if i else -1
            if 0 <= before < len(above):
                down[at] = _longer(above[before], least[i - 1][before])
                if down[at][0] < best:
                    best, which = down[at][0], (down[at][1], 0)
            least[i][at], came[i][at] = best, which
        above = down
    return least[n][-1], _way_back(came, band)


def _longer(passage: Passage, before: float) -> Passage:
    """The cheapest passage that has one sentence more: a longer one, or one that begins with it.
    before: the cheapest path to there."""
    further, first = passage[0] + _FURTHER, before + _PASSAGE
    return (further, passage[1] + 1) if further < first else (first, 1)


def _band(a: Sequence[float], b: Sequence[float]) -> list[range]:
    """How many of the right may be used up where so many of the left are: between the two
    diagonals, that of the sentences' numbers and that of their lengths, and some beside them.
    a, b: sums of the lengths, from 0. A row reaches to where the next begins, so that some way
    leads through."""
    n, m = len(a) - 1, len(b) - 1
    beside = min(_BAND + abs(n - m), max(_BAND, _MOST_PAIRS // (2 * n + 2)))
    marks = [(i * m // max(1, n), bisect_left(b, a[i], 0, m)) for i in range(n + 1)]
    low = [max(0, min(pair) - beside) for pair in marks]
    low[0] = 0
    high = [min(m, max(pair) + beside) for pair in marks]
    high[n] = m
    return [range(low[i], max(high[i], *low[i : i + 2]) + 1) for i in range(n + 1)]


def _sums(sizes: Sequence[int], scale: float) -> list[float]:
    sums = [0.0]
    for size in sizes:
        sums.append(sums[-1] + size * scale)
    return sums


def _mismatch(ours: float, theirs: float) -> float:
    """-log of the chance that lengths that belong together differ so much."""
    delta = abs(theirs - ours) / math.sqrt(_VARIANCE * max(1.0, (ours + theirs) / 2))
    return _COSTS[min(len(_COSTS) - 1, int(delta * _STEPS))]


def _common(bonus: Bonus, i: int, j: int, di: int, dj: int) -> float:
    found = 0.0
    for k in range(i - di, i):
        for at in range(j - dj, j):
            found += bonus.get((k, at), 0.0)
    return min(found, _MOST_BONUS)


def _way_back(came: list[list[Bead]], band: list[range]) -> Path:
    """Of a passage, every sentence by itself: it may be cut between any two."""
    i, j = len(band) - 1, band[-1][-1]
    path = [(i, j)]
    while (i, j) != (0, 0):
        di, dj = came[i][j - band[i].start]
        path += [(i - k, j) for k in range(1, di)] if not dj else []
        path += [(i, j - k) for k in range(1, dj)] if not di else []
        i, j = i - di, j - dj
        path.append((i, j))
    return path[::-1]
