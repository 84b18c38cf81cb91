"""Find sources and translations that are in an evaluation set.

The rule is GPT-3's (Brown et al. 2020, appendix C): a text is contaminated if it shares a run of 13
words with an evaluation text, ignoring case and punctuation. An evaluation text of 8 to 12 words
must be contained completely; a shorter one must equal the text. In scripts without spaces,
characters count as words, and the runs have 20 and 12 characters: Chinese has about 1.6 characters
per word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from scorekit.rows.read import RowFile
from scorekit.text.markup import normalized

_NO_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")
#: Invisible characters: zero-width characters, soft hyphens, direction marks.
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_CHARACTER = re.compile(rf"[{_NO_SPACES}]")
#: (length of a run, shortest text that is searched within another), for words and characters.
_RUNS = ((13, 8), (20, 12))


class EvaluationTexts:
    """The evaluation texts, in about 150 bytes per word."""

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
