"""Find texts that nearly repeat an earlier one, by MinHash.

A text is the set of its runs of five characters. Two texts are as similar as the share of those
that they have in common (Jaccard), which the share of equal values among 126 minima estimates
(Broder 1997), with a standard deviation of at most 0.045. Pairs that are equal in all values of a
band are compared; bands are as long as lets one pair in a hundred at the threshold go by, at most.

Each text takes 252 bytes on the disk, and 35 bytes of memory while a band is sorted. We compute the
minima ourselves: numpy takes 12 us of CPU for a text of 43 characters, rensa 0.5 takes 20,
datasketch 2 takes 338, and their tables of bands live in memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from scorekit.text.markup import normalized

_HASHES, _GRAM = 126, 5
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD
#: Share of pairs at the threshold that must meet in a band.
_RECALL = 0.99
#: Number of rounds per band. The first text of a group finds all its near duplicates; only chance
#: collisions need more rounds.
_ROUNDS = 16
#: Number of rows processed at once.
_CHUNK = 1 << 16


def plan_bands(threshold: float) -> tuple[int, int]:
    """Return (bands, values per band): the longest bands that miss few pairs at the threshold."""
    able = [
        rows
        for rows in range(1, _HASHES + 1)
        if 1 - (1 - threshold**rows) ** (_HASHES // rows) >= _RECALL
    ]
    rows = max(able, default=1)
    return _HASHES // rows, rows


class NearDuplicates:
    """Finds texts that resemble an earlier one; texts are added in order.

    folder: for files of 252 bytes per text, which the caller deletes.
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
        """Return, for each text, the position of an earlier one that it resembles, or -1.

        able: True for texts to compare. The first of similar texts stays; a text that resembles a
        removed text may be removed, too.
        """
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
            members, groups = _band_groups(band, np.flatnonzero(able & (resembles < 0)))
            for _ in range(_ROUNDS):
                if not len(members):
                    break
                first = np.concatenate([[True], groups[1:] != groups[:-1]])
                leaders = members[first][np.cumsum(first) - 1]
                is_follower = ~first
                leader, follower = leaders[is_follower], members[is_follower]
                is_similar = _similarity(values, leader, follower) >= self._threshold - 1e-9
                resembles[follower[is_similar]] = leader[is_similar]
                members, groups = follower[~is_similar], groups[is_follower][~is_similar]
        return resembles


def signatures(texts: Sequence[str]) -> np.ndarray:
    """Return the lower 16 bits of each text's minima, [texts, 126].

    Different minima collide once in 65,536. Case, width and white space are ignored."""
    factors, terms = _permutations()
    plain = [" ".join(normalized("NFKC", text).casefold().split()) for text in texts]
    padded = "".join(text + "\0" * _GRAM for text in plain)
    codes = np.frombuffer(padded.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    grams = np.zeros(max(0, len(codes) - _GRAM + 1), dtype=np.uint64)
    for offset in range(_GRAM):
        grams = grams * np.uint64(_ODD) + codes[offset : offset + len(grams)]
    hashes = (_mixed(grams) >> np.uint64(32)).astype(np.uint32)
    minima = np.empty((len(texts), _HASHES), dtype="<u2")
    start = 0
    for row, text in enumerate(plain):
        text_hashes = hashes[start : start + max(1, len(text))]
        minima[row] = (text_hashes[:, None] * factors + terms).min(axis=0)
        start += len(text) + _GRAM
    return minima


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return values mixed over all 64 bits (one round of MurmurHash3's finalizer)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(_MIX)
    return values ^ (values >> np.uint64(33))


@lru_cache(1)
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """Return factors a (odd) and terms b of x -> a x + b modulo 2**32, equal on every machine."""
    rng = random.Random(126)
    factors = [rng.getrandbits(32) | 1 for _ in range(_HASHES)]
    terms = [rng.getrandbits(32) for _ in range(_HASHES)]
    return np.array(factors, dtype=np.uint32), np.array(terms, dtype=np.uint32)


def _band_groups(band: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the members that equal another one in a band, and their group numbers.

    They are ordered by group, then by position."""
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
    is_single = new & np.concatenate([new[1:], [True]])[: len(keys)]
    return members[order[~is_single]], np.cumsum(new)[~is_single]


def _similarity(values: list[np.ndarray], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the share of equal values of each pair of texts."""
    equal = np.zeros(len(left), dtype=np.int64)
    for start in range(0, len(left), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        for band in values:
            equal[chunk] += (band[left[chunk]] == band[right[chunk]]).sum(axis=1)
    return equal / (len(values) * values[0].shape[1])
