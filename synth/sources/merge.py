"""What the parts of the corpus are together: the entries of the sample, and what was left out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from synth.sources.parts import Part, PartCounts
from synth.sources.sampling import BottomK

if TYPE_CHECKING:
    import numpy as np


def offer_part(sample: BottomK, part: Part) -> None:
    """Tell the sample of all entries of a part."""
    for entries in part.chunks():
        for stratum in set(entries["stratum"].tolist()):
            sample.extend(stratum, entries["priority"][entries["stratum"] == stratum])


def choose(parts: list[Part], cutoffs: list[int], buckets: int) -> tuple[np.ndarray, int]:
    """The entries of the sample by priority, with the part of each, and how many doubles they have.

    Of equal texts the first in the corpus stands for all; of a sentence and a blob that read the
    same, the sentence.
    """
    import numpy as np
    from numpy.lib import recfunctions

    last = np.array([max(cutoff, 0) for cutoff in cutoffs], dtype=np.uint64)
    open_ = np.array([cutoff >= 0 for cutoff in cutoffs])
    found = []
    for part in parts:
        for entries in part.chunks():
            strata = entries["stratum"]
            wanted = entries[open_[strata] & (entries["priority"] <= last[strata])]
            number = np.full(len(wanted), part.index, dtype="<i4")
            found.append(recfunctions.append_fields(wanted, "part", number, usemask=False))
    if not found:
        return np.empty(0), 0
    rows = np.concatenate(found)
    blob = rows["stratum"] >= buckets
    rows = rows[np.lexsort((blob, rows["priority"]))]  # stable: equal ones as in the corpus
    first = np.ones(len(rows), dtype=bool)
    first[1:] = rows["priority"][1:] != rows["priority"][:-1]
    return rows[first], int(len(rows) - first.sum())


def why_nothing(found: list[PartCounts]) -> str:
    """What to tell where no source is left."""
    documents = sum(part.documents for part in found)
    if not documents:
        many = f"{len(found)} files" if len(found) > 1 else found[0].file
        return f"data.files: no document in {many}{first_broken(found)}"
    codes = sum((part.rejected for part in found), Counter())
    return f"data.files: {documents} documents, and no source left of them: {dict(codes)}"


def first_broken(found: list[PartCounts]) -> str:
    """The first line that could not be read, to be told behind something else; or nothing."""
    for part in found:
        for line in part.broken:
            return f"; the first: {part.file} line {line['line']}: {line['reason']}"
    return ""


def unread(rejected: Counter[str]) -> Counter[str]:
    """Of what was left out, the documents that could not be read."""
    codes = ("broken_json", "broken_gzip", "no_text", "not_a_list", "not_a_string")
    return Counter({code: rejected[code] for code in codes if rejected[code]})
