"""Texts that nearly repeat an earlier one, by MinHash.

A text is the set of its runs of five characters. Two texts are as similar as the share of those
that they have in common (Jaccard), which the share of equal values among 126 minima estimates
(Broder 1997), with a standard deviation of at most 0.045. Pairs that are equal in all values of a
band are compared; bands are as long as lets one pair in a hundred at the threshold go by, at most.

What is kept of a text are 252 bytes on the disk; memory is 35 bytes a text, while a band is sorted.
The minima are our own: numpy takes 12 us of CPU for a text of 43 characters, rensa 0.5 takes 20,
datasketch 2 takes 338, and their tables of bands live in memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from scorekit.text.markup import normalised

if TYPE_CHECKING:
    import numpy as np

_HASHES, _GRAM = 126, 5
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD
#: Share of pairs at the threshold that must meet in a band.
_RECALL = 0.99
#: Texts of a band that others are compared with, before it is left. Texts that are alike are told
#: of by the first of them; only what meets by chance needs a second.
_ROUNDS = 16
#: Rows that are worked on at once.
_CHUNK = 1 << 16


def plan_bands(threshold: float) -> tuple[int, int]:
    """(bands, values of each): the longest bands that miss few pairs at the threshold."""
    able = [
        rows
        for rows in range(1, _HASHES + 1)
        if 1 - (1 - threshold**rows) ** (_HASHES // rows) >= _RECALL
    ]
    rows = max(able, default=1)
    return _HASHES // rows, rows


class NearDuplicates:
    """Texts are added in their order; `find` says which resemble an earlier one.

    folder: for files of 252 bytes a text, which are the caller's to delete.
    """

    def __init__(self, folder: Path, threshold: float) -> None:
        self._threshold = threshold
        self._bands, self._rows = plan_bands(threshold)
        self._paths = [folder / f"near-{band:03d}.sig" for band in range(self._bands)]
        self._files = [path.open("wb") for path in self._paths]

    def add(self, texts: Sequence[str]) -> None:
        """Append texts."""
        if not texts:
            return
        minima = signatures(texts)
        for band, file in enumerate(self._files):
            part = minima[:, band * self._rows : (band + 1) * self._rows]
            file.write(part.tobytes())

    def find(self, able: np.ndarray) -> np.ndarray:
        """For each text the position of an earlier one that it resembles, -1 for none.

        able: which texts are compared at all. Of texts that resemble each other the first stays;
        one that resembles a text which resembles a third may go with it.
        """
        import numpy as np

        for file in self._files:
            file.close()
        resembles = np.full(len(able), -1, dtype=np.int64)
        if not len(able):
            return resembles
        values = [
            np.memmap(path, dtype="<u2", mode="r").reshape(len(able), self._rows)
            for path in self._paths
        ]
        for band in values:
            members, groups = _meeting(band, np.flatnonzero(able & (resembles < 0)))
            for _ in range(_ROUNDS):
                if not len(members):
                    break
                first = np.concatenate([[True], groups[1:] != groups[:-1]])
                leaders = members[first][np.cumsum(first) - 1]
                others = ~first
                one, two = leaders[others], members[others]
                alike = _similarity(values, one, two) >= self._threshold - 1e-9
                resembles[two[alike]] = one[alike]
                members, groups = two[~alike], groups[others][~alike]
        return resembles


def signatures(texts: Sequence[str]) -> np.ndarray:
    """[texts, 126] the minima of each text, their lower 16 bits: two that differ are equal once in
    65,536. Case, width and white space do not count."""
    import numpy as np

    factors, terms = _permutations()
    plain = [" ".join(normalised("NFKC", text).casefold().split()) for text in texts]
    padded = "".join(text + "\0" * _GRAM for text in plain)
    codes = np.frombuffer(padded.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    grams = np.zeros(max(0, len(codes) - _GRAM + 1), dtype=np.uint64)
    for place in range(_GRAM):
        grams = grams * np.uint64(_ODD) + codes[place : place + len(grams)]
    hashes = (_mixed(grams) >> np.uint64(32)).astype(np.uint32)
    found = np.empty((len(texts), _HASHES), dtype="<u2")
    start = 0
    for row, text in enumerate(plain):
        own = hashes[start : start + max(1, len(text))]
        found[row] = (own[:, None] * factors + terms).min(axis=0)
        start += len(text) + _GRAM
    return found


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread over all 64 bits (the finaliser of MurmurHash3, a round of it)."""
    import numpy as np

    values = (values ^ (values >> np.uint64(33))) * np.uint64(_MIX)
    return values ^ (values >> np.uint64(33))


@lru_cache(1)
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """x -> a x + b modulo 2**32, a odd: the same on every machine."""
    import numpy as np

    rng = random.Random(126)
    factors = [rng.getrandbits(32) | 1 for _ in range(_HASHES)]
    terms = [rng.getrandbits(32) for _ in range(_HASHES)]
    return np.array(factors, dtype=np.uint32), np.array(terms, dtype=np.uint32)


def _meeting(band: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `members` those that are equal to another in a band, and the number of their group: group
    by group, each in the order of the texts."""
    import numpy as np

    keys = np.zeros(len(members), dtype=np.uint64)
    for start in range(0, len(members), _CHUNK):
        rows = band[members[start : start + _CHUNK]].astype(np.uint64)
        key = np.zeros(len(rows), dtype=np.uint64)
        for column in range(rows.shape[1]):
            key = _mixed(key * np.uint64(_ODD) + rows[:, column] + np.uint64(1))
        keys[start : start + _CHUNK] = key
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    new = np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]
    alone = new & np.concatenate([new[1:], [True]])[: len(keys)]
    return members[order[~alone]], np.cumsum(new)[~alone]


def _similarity(values: list[np.ndarray], one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """The share of equal values of each pair of texts."""
    import numpy as np

    equal = np.zeros(len(one), dtype=np.int64)
    for start in range(0, len(one), _CHUNK):
        here = slice(start, start + _CHUNK)
        for band in values:
            equal[here] += (band[one[here]] == band[two[here]]).sum(axis=1)
    return equal / (len(values) * values[0].shape[1])
