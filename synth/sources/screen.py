"""Remove near duplicates and evaluation texts from the drawn sample.

The merging process searches for both in the order of the sample, so that the result does not depend
on the number of reading processes. The format filter searches translations for evaluation texts,
too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from scorekit.rows.read import RowFile
from scorekit.text.markup import normalized
from synth.config import DataConfig
from synth.reasons import Reason
from synth.record import RejectedRecord
from synth.storage.store import Record

#: Number of sources whose texts are in memory at once.
_BATCH = 1024
#: Reason codes of removed sources.
SCREENED = (Reason.CONTAMINATED, Reason.NEAR_DUPLICATE)

Screen = Callable[[int, Record], RejectedRecord | None]


def is_screened(data: DataConfig) -> bool:
    """Return True if the config requires screening."""
    return bool(data.decontaminate) or data.near_duplicates is not None


def screen_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that the outcome depends on; empty without screening. Raises
    UserError."""
    settings: dict[str, Any] = {}
    if data.near_duplicates is not None:
        settings["near_duplicates"] = data.near_duplicates
    if data.decontaminate:
        settings["decontaminate"] = digests(data.decontaminate)
    return settings


def screen(
    data: DataConfig, chosen: np.ndarray, record_of: Callable[[Any], Record], folder: Path
) -> Screen:
    """Screen the sample; return a function from a position and its record to a rejection or None.

    chosen: entries of the sample.
    record_of: returns the record of an entry.
    folder: for temporary files.
    """
    texts = evaluation_texts(data.decontaminate)
    contaminated: dict[int, str] = {}
    near = None
    if data.near_duplicates is not None:
        near = NearDuplicates(folder, data.near_duplicates)
    for start in range(0, len(chosen), _BATCH):
        batch = [record_of(row)["source_text"] for row in chosen[start : start + _BATCH]]
        if texts is not None:
            for position, text in enumerate(batch, start):
                if (reason := texts.find(text)) is not None:
                    contaminated[position] = reason
        if near is not None:
            near.add(batch)
    able = np.ones(len(chosen), dtype=bool)
    able[list(contaminated)] = False
    resembles = None if near is None else near.find(able)

    def verdict(position: int, record: Record) -> RejectedRecord | None:
        if position in contaminated:
            return RejectedRecord(record, Reason.CONTAMINATED, contaminated[position])
        if resembles is None or resembles[position] < 0:
            return None
        like = record_of(chosen[resembles[position]])["source_id"]
        seen = f"resembles {like}"
        return RejectedRecord(record, Reason.NEAR_DUPLICATE, seen, {"resembles": like})

    return verdict


# -- near duplicates -------------------------------------------------------------------------------


#: Number of minima of a text, and of characters in a run.
_HASHES, _GRAM = 126, 5
#: Factors that mix the bits of a run.
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
    """Finds texts that nearly repeat an earlier one, by MinHash; texts are added in order.

    A text is the set of its runs of five characters. Two texts are as similar as the share of those
    that they have in common (Jaccard), which the share of equal values among 126 minima estimates
    (Broder 1997), with a standard deviation of at most 0.045. Pairs that are equal in all values of
    a band are compared; bands are as long as lets one pair in a hundred at the threshold go by, at
    most.

    Each text takes 252 bytes on the disk, and 35 bytes of memory while a band is sorted. We compute
    the minima ourselves: numpy takes 12 us of CPU for a text of 43 characters, rensa 0.5 takes 20,
    datasketch 2 takes 338, and their tables of bands live in memory.

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
    hashes = (_mix(grams) >> np.uint64(32)).astype(np.uint32)
    minima = np.empty((len(texts), _HASHES), dtype="<u2")
    start = 0
    for row, text in enumerate(plain):
        text_hashes = hashes[start : start + max(1, len(text))]
        minima[row] = (text_hashes[:, None] * factors + terms).min(axis=0)
        start += len(text) + _GRAM
    return minima


def _mix(values: np.ndarray) -> np.ndarray:
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
            key = _mix(key * np.uint64(_ODD) + rows[:, column] + np.uint64(1))
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


# -- evaluation texts ------------------------------------------------------------------------------


#: Characters of scripts without spaces between words.
_NO_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")
#: Invisible characters: zero-width characters, soft hyphens, direction marks.
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_CHARACTER = re.compile(rf"[{_NO_SPACES}]")
#: (length of a run, shortest text that is searched within another), for words and characters.
_RUNS = ((13, 8), (20, 12))


class EvaluationTexts:
    """Finds sources and translations that are in an evaluation set, in about 150 bytes per word.

    The rule is GPT-3's (Brown et al. 2020, appendix C): a text is contaminated if it shares a run
    of 13 words with an evaluation text, ignoring case and punctuation. An evaluation text of 8 to
    12 words must be contained completely; a shorter one must equal the text. In scripts without
    spaces, characters count as words, and the runs have 20 and 12 characters: Chinese has about 1.6
    characters per word.
    """

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        """Index texts, each with its location for the reason."""
        self._full_texts: dict[str, str] = {}
        self._runs: dict[str, str] = {}
        self._heads: set[str] = set()
        self._sizes: tuple[set[int], set[int]] = (set(), set())
        for text, location in texts:
            self._add(text, location)

    def _add(self, text: str, location: str) -> None:
        units, kind = _units(text)
        if not units:
            return
        self._full_texts.setdefault(" ".join(units), location)
        run_length, min_length = _RUNS[kind]
        size = min(run_length, len(units))
        if size < min_length:
            return
        self._sizes[kind].add(size)
        for start in range(len(units) - size + 1):
            self._heads.add(" ".join(units[start : start + min_length]))
            self._runs.setdefault(" ".join(units[start : start + size]), location)

    def find(self, text: str) -> str | None:
        """Return why a text is contaminated; None if it is not."""
        units, _ = _units(text)
        location = self._full_texts.get(" ".join(units))
        if location is not None:
            return f"is {location}"
        # Search both kinds: a text can contain a passage in another script.
        reasons = (self._find_run(units, kind) for kind, sizes in enumerate(self._sizes) if sizes)
        return next(filter(None, reasons), None)

    def _find_run(self, units: list[str], kind: int) -> str | None:
        min_length = _RUNS[kind][1]
        for start in range(len(units) - min_length + 1):
            if " ".join(units[start : start + min_length]) not in self._heads:
                continue
            for size in sorted(self._sizes[kind]):
                location = self._runs.get(" ".join(units[start : start + size]))
                if location is not None and start + size <= len(units):
                    return f"shares {size} {('words', 'characters')[kind]} with {location}"
        return None


def _units(text: str) -> tuple[list[str], int]:
    """Return words and characters of scripts without spaces; 1 if most are such characters."""
    units: list[str] = _UNIT.findall(_UNSEEN.sub("", normalized("NFKC", text)).casefold())
    characters = sum(len(unit) == 1 and _CHARACTER.match(unit) is not None for unit in units)
    return units, int(2 * characters > len(units))


def evaluation_texts(files: Sequence[str]) -> EvaluationTexts | None:
    """Return the texts of files, read once per process; None without files. Raises UserError."""
    return _read(tuple(files)) if files else None


@lru_cache(4)
def _read(files: tuple[str, ...]) -> EvaluationTexts:
    return EvaluationTexts(pair for file in files for pair in _texts(Path(file)))


def digests(files: Sequence[str]) -> list[str]:
    """Return name and digest of each file, for a stage's settings. Raises UserError."""
    named_digests = []
    for name in files:
        path = Path(name)
        named_digests.append(f"{path.name}:{RowFile(path).digest()[:16]}")
    return sorted(named_digests)


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a text file, or every string of a row, with its location."""
    file = RowFile(path)
    for row in file.rows((), None):
        for text in _strings(row.fields):
            unit = "line" if file.format == "txt" else "row"
            yield text, f"{path.name} {unit} {row.number}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
