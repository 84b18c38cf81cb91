"""What is taken out of the sample once it is drawn: evaluation texts and near duplicates.

Both are looked for in the order of the sample, by the process that merges, so that they do not
depend on how many processes read the corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synth.config import DataConfig
from synth.folder.store import Record
from synth.record import Rejected
from synth.sources.decontaminate import digests, evaluation_texts
from synth.sources.near_duplicates import NearDuplicates

if TYPE_CHECKING:
    import numpy as np

#: Sources whose texts are held at once.
_BATCH = 1024

#: The codes of what is taken out.
SCREENED = ("contaminated", "near_duplicate")

Screen = Callable[[int, Record], Rejected | None]


def is_screened(data: DataConfig) -> bool:
    """Whether anything is looked for."""
    return bool(data.decontaminate) or data.near_duplicates is not None


def screen_settings(data: DataConfig) -> dict[str, Any]:
    """What the outcome depends on; nothing where nothing is looked for. Raises UserError."""
    told: dict[str, Any] = {}
    if data.near_duplicates is not None:
        told["near_duplicates"] = data.near_duplicates
    if data.decontaminate:
        told["decontaminate"] = digests(data.decontaminate)
    return told


def screen(
    data: DataConfig, chosen: np.ndarray, read: Callable[[Any], Record], folder: Path
) -> Screen:
    """Look through the sample; a function of a position and its record, that gives the rejection.

    chosen: entries of the sample; read: the record of an entry; folder: for temporary files.
    """
    import numpy as np

    texts = evaluation_texts(data.decontaminate)
    contaminated: dict[int, str] = {}
    near = None
    if data.near_duplicates is not None:
        near = NearDuplicates(folder, data.near_duplicates)
    for start in range(0, len(chosen), _BATCH):
        batch = [read(row)["source_text"] for row in chosen[start : start + _BATCH]]
        if texts is not None:
            for place, text in enumerate(batch, start):
                if (reason := texts.find(text)) is not None:
                    contaminated[place] = reason
        if near is not None:
            near.add(batch)
    able = np.ones(len(chosen), dtype=bool)
    able[list(contaminated)] = False
    resembles = None if near is None else near.find(able)

    def verdict(place: int, record: Record) -> Rejected | None:
        if place in contaminated:
            return Rejected(record, "contaminated", contaminated[place])
        if resembles is None or resembles[place] < 0:
            return None
        like = read(chosen[resembles[place]])["source_id"]
        return Rejected(record, "near_duplicate", f"resembles {like}", {"resembles": like})

    return verdict
