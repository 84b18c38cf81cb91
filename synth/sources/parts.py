"""The part of one corpus file on the disk (texts, an index, counts), and the merge of all parts.

A part has every source of its file that can be in the sample; the selection is known once all parts
exist. It is complete when its mark exists: file-00000.jsonl and .idx are renamed before. The merge
selects the sample's entries, and counts the others.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import recfunctions

from scorekit.files import atomic_writer, write_atomic
from synth.reasons import Reason
from synth.sources.sampling import TYPES, BottomK
from synth.storage.store import Record, to_line

#: An entry of the index: `at` and `size` locate the record's line in the part.
_ENTRY = [("priority", "<u8"), ("stratum", "<u2"), ("at", "<i8"), ("size", "<i8")]
#: Number of index entries read at once, and largest number of broken lines that are listed.
_CHUNK, _MAX_BROKEN = 1 << 16, 20
#: Which sources a part has. Parts of version 1 (without the key) lack blobs that take the place of
#: those whose text is a chosen sentence, too.
_VERSION = 2


@dataclass(slots=True)
class PartCounts:
    """The counts of a file.

    pieces: segments and blobs before filtering.
    rejected: rejected ones by code.
    broken: the first unreadable lines.
    newlines: how line ends are written.
    """

    file: str
    newlines: str = "real"
    documents: int = 0
    pieces: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    broken_lines: int = 0
    broken: list[dict[str, Any]] = field(default_factory=list)

    def note_broken(self, line: int, code: Reason, reason: str) -> None:
        """Count a line that is not a document."""
        self.rejected[code] += 1
        self.broken_lines += 1
        if len(self.broken) < _MAX_BROKEN:
            self.broken.append({"line": line, "code": code, "reason": reason[:200]})


class Part:
    """The files of one part."""

    def __init__(self, folder: Path, index: int) -> None:
        self.index = index
        self.texts = folder / f"file-{index:05d}.jsonl"
        self.entries = folder / f"file-{index:05d}.idx"
        self._mark = folder / f"file-{index:05d}.json"

    def counts(self) -> PartCounts | None:
        """Return the counts; None while the part is not complete, or if it is outdated."""
        content = self._content()
        if content is None or content.pop("version", 1) != _VERSION:
            return None
        return PartCounts(**{**content, "rejected": Counter(content["rejected"])})

    def is_outdated(self) -> bool:
        """Return True if an earlier version of the code has written it, with fewer sources."""
        content = self._content()
        return content is not None and content.get("version", 1) != _VERSION

    def _content(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(self._mark.read_bytes())
        except FileNotFoundError:
            return None
        return content

    def set_counts(self, counts: PartCounts) -> None:
        """Mark the part as complete."""
        content = {name: getattr(counts, name) for name in PartCounts.__slots__}
        content["rejected"] = dict(sorted(counts.rejected.items()))
        content["version"] = _VERSION
        write_atomic(self._mark, to_line(content), alone=True)

    def drop(self) -> None:
        """Remove the mark, so that the file is read again."""
        self._mark.unlink(missing_ok=True)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the index in chunks."""
        with self.entries.open("rb") as file:
            while len(chunk := np.fromfile(file, dtype=np.dtype(_ENTRY), count=_CHUNK)):
                yield chunk


@contextmanager
def open_part_writer(part: Part) -> Iterator[PartWriter]:
    """Yield the writer of a part's files, which get their final names at the end of the block."""
    with (
        atomic_writer(part.texts, alone=True) as texts,
        atomic_writer(part.entries, alone=True) as entries,
    ):
        yield PartWriter(texts, entries)


class PartWriter:
    """Writes sources to the two open files of a part."""

    def __init__(self, texts: IO[bytes], entries: IO[bytes]) -> None:
        self._texts, self._entries = texts, entries
        self._row = np.zeros(1, dtype=np.dtype(_ENTRY))
        self._offset = 0

    def write(self, priority: int, stratum: int, record: Record) -> None:
        """Append a source, in the order of the file."""
        text = to_line(record)
        self._texts.write(text)
        self._row[0] = (priority, stratum, self._offset, len(text))
        self._entries.write(self._row.tobytes())
        self._offset += len(text)


class PartReaders:
    """Reads records of parts by their entries."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = {part.index: part for part in parts}
        self._open: dict[int, int] = {}

    def read(self, entry: Any) -> Record:
        index = int(entry["part"])
        if index not in self._open:
            if len(self._open) >= 256:
                self._close()
            self._open[index] = os.open(self._parts[index].texts, os.O_RDONLY)
        record: Record = json.loads(
            os.pread(self._open[index], int(entry["size"]), int(entry["at"]))
        )
        return record

    def _close(self) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def __enter__(self) -> PartReaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


#: Codes of documents that cannot be read.
_UNREADABLE = (
    Reason.BROKEN_JSON,
    Reason.BROKEN_GZIP,
    Reason.NO_TEXT,
    Reason.NOT_A_LIST,
    Reason.NOT_A_STRING,
)


def offer_part(sample: BottomK, part: Part) -> None:
    """Offer all entries of a part to the sample."""
    for entries in part.chunks():
        for stratum in set(entries["stratum"].tolist()):
            sample.extend(stratum, entries["priority"][entries["stratum"] == stratum])


def choose(
    parts: list[Part], chosen: list[np.ndarray], *, is_short: bool
) -> tuple[np.ndarray, int]:
    """Return the sample's entries by priority, with their parts, and the number of duplicates.

    chosen: the sorted priorities of each stratum.
    is_short: the corpus has no other sources. Of equal texts the first in the corpus is kept.
    """
    half = len(chosen) // len(TYPES)
    chunks, num_entries = [], 0
    for part in parts:
        for entries in part.chunks():
            for stratum in np.unique(entries["stratum"]).tolist():
                candidates = entries[entries["stratum"] == stratum]
                if not is_short:
                    # How many are written beyond the last chosen one depends on the processes.
                    last = chosen[stratum][-1] if len(chosen[stratum]) else np.uint64(0)
                    candidates = candidates[candidates["priority"] <= last]
                is_chosen = _is_in(candidates["priority"], chosen[stratum])
                other = chosen[(stratum + half) % len(chosen)]
                num_entries += int((is_chosen | _is_in(candidates["priority"], other)).sum())
                selected = candidates[is_chosen]
                number = np.full(len(selected), part.index, dtype="<i4")
                chunks.append(recfunctions.append_fields(selected, "part", number, usemask=False))
    if not chunks:
        return np.empty(0), 0
    rows = np.concatenate(chunks)
    # Within a stratum the chunks are in the order of the corpus, and equal priorities are of one
    # stratum: a stable sort keeps the first of them first.
    rows = rows[np.argsort(rows["priority"], kind="stable")]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = rows["priority"][1:] != rows["priority"][:-1]
    return rows[first], num_entries - int(first.sum())


def _is_in(priorities: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return which priorities are among the chosen ones, which are sorted."""
    if not len(chosen):
        return np.zeros(len(priorities), dtype=bool)
    positions = np.minimum(np.searchsorted(chosen, priorities), len(chosen) - 1)
    return np.asarray(chosen[positions] == priorities)


def no_source_reason(parts: list[PartCounts]) -> str:
    """Return the error message if no source remains."""
    documents = sum(part.documents for part in parts)
    if not documents:
        many = f"{len(parts)} files" if len(parts) > 1 else parts[0].file
        return f"data.files: no document in {many}{first_broken(parts)}"
    codes = sum((part.rejected for part in parts), Counter())
    return f"data.files: {documents} documents, and no source left of them: {dict(codes)}"


def first_broken(parts: list[PartCounts]) -> str:
    """Return text about the first unreadable line, to append to a message, or an empty text."""
    for part in parts:
        for line in part.broken:
            return f"; the first: {part.file} line {line['line']}: {line['reason']}"
    return ""


def unread(rejected: Counter[str]) -> Counter[str]:
    """Return the counts of unreadable documents among the rejected ones."""
    return Counter({code: rejected[code] for code in _UNREADABLE if rejected[code]})
