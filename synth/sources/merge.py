"""Merge the parts of the corpus: select the sample's entries, and count the others."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.lib import recfunctions

from synth.reasons import Reason
from synth.sources.parts import Part, PartCounts
from synth.sources.sampling import TYPES, BottomK

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

    chosen: the sorted priorities of each stratum. is_short: the corpus has no other sources. Of
    equal texts the first in the corpus is kept.
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
