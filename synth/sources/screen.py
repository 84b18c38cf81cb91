"""Remove evaluation texts and near duplicates from the drawn sample.

The merging process searches for both in the order of the sample, so that the result does not depend
on the number of reading processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from synth.config import DataConfig
from synth.reasons import Reason
from synth.record import RejectedRecord
from synth.sources.decontaminate import digests, evaluation_texts
from synth.sources.near_duplicates import NearDuplicates
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
    data: DataConfig, chosen: np.ndarray, read: Callable[[Any], Record], folder: Path
) -> Screen:
    """Screen the sample; return a function from a position and its record to a rejection or None.

    chosen: entries of the sample; read: the record of an entry; folder: for temporary files.
    """
    texts = evaluation_texts(data.decontaminate)
    contaminated: dict[int, str] = {}
    near = None
    if data.near_duplicates is not None:
        near = NearDuplicates(folder, data.near_duplicates)
    for start in range(0, len(chosen), _BATCH):
        batch = [read(row)["source_text"] for row in chosen[start : start + _BATCH]]
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
        like = read(chosen[resembles[position]])["source_id"]
        seen = f"resembles {like}"
        return RejectedRecord(record, Reason.NEAR_DUPLICATE, seen, {"resembles": like})

    return verdict
