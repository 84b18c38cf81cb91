"""Sources and translations that stand in an evaluation set are left out.

The rule is that of GPT-3 (Brown et al. 2020, appendix C): a text that shares a run of 13 words with
an evaluation text is contaminated, whatever case and punctuation; an evaluation text of 8 to 12
words where it stands there whole, a shorter one only where it is the whole text. In scripts that
write no spaces a character counts for a word, and the runs are of 20 and 12: Chinese has about 1.6
characters a word.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.rowfile import RowFile
from scorekit.text.markup import normalised

_NO_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")
#: What no reader sees: zero-width characters, soft hyphens, marks of direction.
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_CHARACTER = re.compile(rf"[{_NO_SPACES}]")
#: (units of a run, the fewest units that are looked for inside of a text), of words and of
#: characters.
_RUNS = ((13, 8), (20, 12))


class EvaluationTexts:
    """The texts that must not be trained on. About 150 bytes for each of their words."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        """texts: each with the place it stands at, for the reason."""
        self._whole: dict[str, str] = {}
        self._runs: dict[str, str] = {}
        self._heads: set[str] = set()
        self._sizes: tuple[set[int], set[int]] = (set(), set())
        for text, place in texts:
            self._add(text, place)

    def _add(self, text: str, place: str) -> None:
        units, kind = _units(text)
        if not units:
            return
        self._whole.setdefault(" ".join(units), place)
        most, least = _RUNS[kind]
        size = min(most, len(units))
        if size < least:
            return
        self._sizes[kind].add(size)
        for start in range(len(units) - size + 1):
            self._heads.add(" ".join(units[start : start + least]))
            self._runs.setdefault(" ".join(units[start : start + size]), place)

    def find(self, text: str) -> str | None:
        """Why a text is contaminated: what it shares with which evaluation text; None if not."""
        units, _ = _units(text)
        place = self._whole.get(" ".join(units))
        if place is not None:
            return f"is {place}"
        # Both kinds, whatever most of this text is: what stands in it may be of the other.
        found = (self._find_run(units, kind) for kind, sizes in enumerate(self._sizes) if sizes)
        return next(filter(None, found), None)

    def _find_run(self, units: list[str], kind: int) -> str | None:
        least = _RUNS[kind][1]
        for start in range(len(units) - least + 1):
            if " ".join(units[start : start + least]) not in self._heads:
                continue
            for size in sorted(self._sizes[kind]):
                place = self._runs.get(" ".join(units[start : start + size]))
                if place is not None and start + size <= len(units):
                    return f"shares {size} {('words', 'characters')[kind]} with {place}"
        return None


def _units(text: str) -> tuple[list[str], int]:
    """Words, and characters of scripts without spaces; 1 where most are such characters."""
    units: list[str] = _UNIT.findall(_UNSEEN.sub("", normalised("NFKC", text)).casefold())
    characters = sum(len(unit) == 1 and _CHARACTER.match(unit) is not None for unit in units)
    return units, int(2 * characters > len(units))


def evaluation_texts(files: Sequence[str]) -> EvaluationTexts | None:
    """The texts of files, read once a process; None where there are no files. Raises UserError."""
    return _read(tuple(files)) if files else None


@lru_cache(4)
def _read(files: tuple[str, ...]) -> EvaluationTexts:
    return EvaluationTexts(pair for file in files for pair in _texts(Path(file)))


def digests(files: Sequence[str]) -> list[str]:
    """What names the content of each file in a stage's settings. Raises UserError."""
    found = []
    for name in files:
        path = Path(name)
        digest = _text_digest(path) if _is_text(path) else RowFile(path).digest()
        found.append(f"{path.name}:{digest[:16]}")
    return sorted(found)


def _is_text(path: Path) -> bool:
    return path.name.endswith((".txt", ".txt.gz"))


def _text_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in _lines(path):
        digest.update(line.encode())
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                yield line.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.decontaminate: {path}: cannot be read: {reason}") from None


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """A text a line, or every string of a row, whatever its field's name."""
    if _is_text(path):
        for number, line in enumerate(_lines(path), 1):
            yield line, f"{path.name} line {number}"
        return
    for row in RowFile(path).rows((), None):
        for text in _strings(row.fields):
            yield text, f"{path.name} row {row.number}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
