"""Convert decisions of `diagnose`, `hallucinations` and `verify` to entries of the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainer.sft.curation_record import RecordEntry, Verdict

#: Commands whose decisions are part of the record.
DECIDE: Final = ("diagnose", "hallucinations", "verify")
#: Kinds of answers without a gold page whose visible images have the fact.
_EVIDENT: Final = ("same_document", "same_data")


def entries_of(command: str, row: Mapping[str, Any]) -> Iterator[RecordEntry]:
    """Yield the entries of the record for a row of a command's decisions.jsonl."""
    id, reason = str(row["id"]), str(row["reason"])
    if command == "verify":
        if row.get("class"):
            yield RecordEntry(id, command, "keep" if row["kept"] else "drop", str(row["class"]))
        elif reason.startswith("no verdict"):
            yield RecordEntry(id, command, "open", reason)
    elif command == "diagnose":
        if row["kept"]:
            verdict: Verdict = "doubt" if reason == "reference_suspected" else "keep"
            yield RecordEntry(id, command, verdict, reason)
    elif command == "hallucinations":
        kinds = row.get("episode_kinds") or {}
        if kinds or not row["kept"]:
            yield RecordEntry(id, command, "keep" if row["kept"] else "drop", reason)
        for episode, kind in kinds.items():
            verdict = "keep" if kind in _EVIDENT else "open" if kind == "undecided" else "drop"
            yield RecordEntry(id, command, verdict, str(kind), str(episode))
