"""Select examples for the report: accepted, rejected and rescued pairs.

It reads accepted and rejected records once each, with a few records in memory. A source's id is a
hash of its text, so the smallest ids are a random but reproducible sample.
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
from synth.reasons import explain
from synth.stages.format_filter import FormatFilter
from synth.stages.table import ORDER
from synth.storage.distributions import stratum
from synth.storage.store import Record, StageFolder

SHOWN = 8  # pairs of each kind that were kept
_PER_STRATUM, _RESCUED = 3, 6  # of a length bucket; of all
_REJECTED, _CODES = 2, 60  # of a reason; reasons: a judge may make up its own


class Smallest:
    """Keeps the records with the `count` smallest keys."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._candidates: list[tuple[Any, Record]] = []

    def offer(self, key: Any, record: Record) -> None:
        """Add a record."""
        self._candidates.append((key, record))
        if len(self._candidates) > 64 * self._count:
            self._candidates = self._smallest()

    def records(self) -> list[Record]:
        """Return the records in the order of their keys."""
        return [record for _, record in self._smallest()]

    def _smallest(self) -> list[tuple[Any, Record]]:
        return heapq.nsmallest(self._count, self._candidates, key=lambda pair: pair[0])


@dataclass(slots=True)
class Examples:
    """Examples. accepted: {"title", "records"}; rejected: see `_beside`; rescued: see `_rescue`."""

    accepted: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    rescued: list[dict[str, Any]]


def pick_examples(out_dir: Path, stages: Sequence[Stage] = ORDER) -> Examples:
    """Return the examples of a run, also of an unfinished one."""
    random_sample, best, worst = (Smallest(SHOWN) for _ in range(3))
    rescued = Smallest(_RESCUED)
    by_stratum: dict[str, Smallest] = defaultdict(lambda: Smallest(_PER_STRATUM))
    folder = StageFolder(out_dir, FormatFilter.name)
    for record in folder.records() if folder.done() else ():
        name, score = record["source_id"], record["best"]["score"]
        random_sample.offer(name, record)
        best.offer((score, name), record)
        worst.offer((-score, name), record)
        by_stratum[stratum(record)].offer(name, record)
        if record["filters"]["tried"]:
            rescued.offer(name, record)
    kinds = (
        ("Drawn at random", random_sample),
        ("Best scores", best),
        ("Worst scores that were kept", worst),
    )
    accepted = [{"title": title, "records": top.records()} for title, top in kinds]
    accepted_by_stratum = {name: cycle(top.records()) for name, top in by_stratum.items()}
    any_accepted = cycle(random_sample.records() or [None])
    return Examples(
        [kind for kind in accepted if kind["records"]],
        [
            _compared_with(r, next(accepted_by_stratum.get(stratum(r), any_accepted)))
            for r in _rejected(out_dir, stages)
        ],
        [_rescue(record) for record in rescued.records()],
    )


def _rejected(out_dir: Path, stages: Sequence[Stage]) -> Iterator[Record]:
    """Yield a few rejected records for each reason, from stages that check translations."""
    for stage in stages:
        if not stage.shows_rejected:
            continue
        folder = StageFolder(out_dir, stage.name)
        examples_by_code: dict[str, Smallest] = {}
        for record in folder.all_rejected() if folder.done() else ():
            code = record["reason_code"]
            if code in examples_by_code or len(examples_by_code) < _CODES:
                examples_by_code.setdefault(code, Smallest(_REJECTED)).offer(
                    record["source_id"], record
                )
        for code in sorted(examples_by_code):
            yield from examples_by_code[code].records()


def _compared_with(record: Record, accepted: Record | None) -> dict[str, Any]:
    """Return a rejected record next to an accepted pair of the same type and length."""
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
    """Return the rejected translation if there is a single one and it was stored."""
    if "best" in record:
        return str(record["best"]["text"])
    which = record["reason_code"].partition("_")[0]
    return record.get(which) if which in ("greedy", "sample") else None


def _rescue(record: Record) -> dict[str, Any]:
    """Return a source whose best candidate was rejected and a later one accepted."""
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
