"""Merge the parts of the corpus: select the sample's entries, and count the others."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.lib import recfunctions

from synth.reasons import Reason
from synth.sources.parts import Part, PartCounts
from synth.sources.sampling import BottomK

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


def choose(parts: list[Part], cutoffs: list[int], buckets: int) -> tuple[np.ndarray, int]:
    """Return the sample's entries by priority, with their parts, and the number of duplicates.

    Of equal texts the first in the corpus is kept; of an equal sentence and blob, the sentence.
    """
    last = np.array([max(cutoff, 0) for cutoff in cutoffs], dtype=np.uint64)
    open_ = np.array([cutoff >= 0 for cutoff in cutoffs])
    selected_chunks = []
    for part in parts:
        for entries in part.chunks():
            strata = entries["stratum"]
            selected = entries[open_[strata] & (entries["priority"] <= last[strata])]
            number = np.full(len(selected), part.index, dtype="<i4")
            selected_chunks.append(
                recfunctions.append_fields(selected, "part", number, usemask=False)
            )
    if not selected_chunks:
        return np.empty(0), 0
    rows = np.concatenate(selected_chunks)
    blob = rows["stratum"] >= buckets
    rows = rows[np.lexsort((blob, rows["priority"]))]  # stable: equal ones as in the corpus
    first = np.ones(len(rows), dtype=bool)
    first[1:] = rows["priority"][1:] != rows["priority"][:-1]
    return rows[first], int(len(rows) - first.sum())


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
