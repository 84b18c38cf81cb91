"""Examples for the report: pairs that were kept, rejected ones beside kept ones, rescued ones.

One pass over what the filter let through and one over what was rejected, a few records in memory.
A source's id is a hash of its text, so that the smallest ids are drawn at random, always the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from synth.context import Stage
from synth.folder.store import Record, StageFolder
from synth.report.reasons import explain
from synth.stages.format_filter import FormatFilter
from synth.stages.table import ORDER

SHOWN = 8  # pairs of each kind that were kept
_BESIDE, _RESCUED = 3, 6  # of a length bucket; of all
_REJECTED, _CODES = 2, 60  # of a reason; reasons: a judge may make up its own


class Smallest:
    """The records of the smallest keys, `count` at most, of any number that are offered."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[tuple[Any, Record]] = []

    def offer(self, key: Any, record: Record) -> None:
        """One more."""
        self._held.append((key, record))
        if len(self._held) > 64 * self._count:
            self._held = self._smallest()

    def records(self) -> list[Record]:
        """In the order of their keys."""
        return [record for _, record in self._smallest()]

    def _smallest(self) -> list[tuple[Any, Record]]:
        return heapq.nsmallest(self._count, self._held, key=lambda pair: pair[0])


@dataclass(slots=True)
class Examples:
    """kept: {"title", "records"}; rejected: see `_beside`; rescued: see `_rescue`."""

    kept: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    rescued: list[dict[str, Any]]


def pick_examples(out_dir: Path, stages: Sequence[Stage] = ORDER) -> Examples:
    """Of a run, as far as it has come."""
    drawn, best, worst = (Smallest(SHOWN) for _ in range(3))
    rescued = Smallest(_RESCUED)
    alike: dict[tuple[str, int], Smallest] = defaultdict(lambda: Smallest(_BESIDE))
    folder = StageFolder(out_dir, FormatFilter.name)
    for record in folder.records() if folder.done() else ():
        name, score = record["source_id"], record["best"]["score"]
        drawn.offer(name, record)
        best.offer((score, name), record)
        worst.offer((-score, name), record)
        alike[_stratum(record)].offer(name, record)
        if record["filters"]["tried"]:
            rescued.offer(name, record)
    kinds = (
        ("Drawn at random", drawn),
        ("Best scores", best),
        ("Worst scores that were kept", worst),
    )
    kept = [{"title": title, "records": top.records()} for title, top in kinds]
    beside = {stratum: cycle(top.records()) for stratum, top in alike.items()}
    others = cycle(drawn.records() or [None])
    return Examples(
        [kind for kind in kept if kind["records"]],
        [_beside(r, next(beside.get(_stratum(r), others))) for r in _rejected(out_dir, stages)],
        [_rescue(record) for record in rescued.records()],
    )


def _stratum(record: Record) -> tuple[str, int]:
    """Sources of one type and length."""
    return record["source_type"], record["length_bucket_id"]


def _rejected(out_dir: Path, stages: Sequence[Stage]) -> Iterator[Record]:
    """A few of each reason, of the stages that look at translations."""
    for stage in stages:
        if not stage.shows_rejected:
            continue
        folder = StageFolder(out_dir, stage.name)
        found: dict[str, Smallest] = {}
        for record in folder.all_rejected() if folder.done() else ():
            code = record["reason_code"]
            if code in found or len(found) < _CODES:
                found.setdefault(code, Smallest(_REJECTED)).offer(record["source_id"], record)
        for code in sorted(found):
            yield from found[code].records()


def _beside(record: Record, accepted: Record | None) -> dict[str, Any]:
    """A rejected record, and a pair that was kept of a source of its type and length."""
    code = record["reason_code"]
    return {
        "stage": record["stage"],
        "code": code,
        "meaning": explain(code),
        "seen": record.get("reason") or "",
        "source": record["source_text"],
        "candidate": _candidate(record),
        "beside": accepted,
    }


def _candidate(record: Record) -> str | None:
    """What the teacher had written, where one text is to blame and was kept."""
    if "best" in record:
        return str(record["best"]["text"])
    which = record["reason_code"].partition("_")[0]
    return record.get(which) if which in ("greedy", "sample") else None


def _rescue(record: Record) -> dict[str, Any]:
    """A source whose best candidate was refused and a later one taken."""
    first = record["filters"]["tried"][0]
    texts = {candidate["index"]: candidate for candidate in record["topk"]}
    refused = texts.get(first["index"], {})
    return {
        "source": record["source_text"],
        "code": first["reason_code"],
        "refused": refused.get("text"),
        "refused_score": refused.get("score"),
        "taken": record["target_text"],
        "taken_score": record["best"]["score"],
        "tried": len(record["filters"]["tried"]),
    }
