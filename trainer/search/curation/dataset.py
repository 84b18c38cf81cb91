"""What every curation command leaves: a folder, whole or not there, the same bytes for the same
inputs.

OUT/
    rows.jsonl, rows.parquet            what is kept, as training reads it
    decisions.jsonl, decisions.parquet  every row, kept and dropped: why, its figures, and the
                                        episodes behind it
    manifest.json                       the command, its settings, what it read (digests), counts
    record.jsonl                        of diagnose, hallucinations and verify: what was decided so
                                        far, by them and by what they read (--record)
    report.html                         the same for eyes
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from scorekit.errors import UserError
from scorekit.files import remove_temporaries, replacing_folder
from trainer.search.curation.entries import entries_of
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.search.curation.spool import Spool, in_groups
from trainer.search.records import Question
from trainer.sft.curation_record import FILE, CurationRecord

SCHEMA_VERSION = 1
_AT_ONCE = 200  # rows in memory, in a group of Parquet


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a row. reason: in one of the command's few words, by which rows are counted.
    figures: numbers and words that it rests on. episodes: run/trajectory of those behind it."""

    row_id: str
    kept: bool
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    episodes: Sequence[str] = ()

    def line(self) -> dict[str, Any]:
        """As it is written."""
        head = {"id": self.row_id, "kept": self.kept, "reason": self.reason}
        return {**head, **self.figures, "episodes": list(self.episodes)}


@dataclass(slots=True)
class Curated:
    """What a command makes, before it is written.

    command: its name. settings: the section of the config. runs: what was read. inputs: other
    files, name -> digest. told: further counts and figures for the manifest. record: what was
    decided before, of a command whose decisions belong into it. rows: what is kept. decisions: of
    all rows.
    """

    command: str
    settings: BaseModel
    runs: Sequence[CuratedRun]
    inputs: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    record: CurationRecord | None = None
    rows: Spool[dict[str, Any]] = field(default_factory=lambda: Spool(dict), init=False)
    decisions: Spool[Decision] = field(default_factory=lambda: Spool(Decision), init=False)

    def manifest(self) -> dict[str, Any]:
        """manifest.json."""
        reasons = Counter((one.kept, one.reason) for one in self.decisions)
        kept = sum(count for (of, _), count in reasons.items() if of)
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "settings": self.settings.model_dump(mode="json"),
            "runs": [
                {"folder": str(r.folder), "run": r.name, "episodes": r.episodes, "sha256": r.digest}
                for r in self.runs
            ],
            "inputs": dict(self.inputs),
            "counts": {
                "rows": reasons.total(),
                "kept": kept,
                "dropped": reasons.total() - kept,
                "reasons": {
                    ("kept: " if of else "dropped: ") + reason: count
                    for (of, reason), count in sorted(reasons.items())
                },
            },
            **self.told,
        }


def question_row(question: Question, **changed: Any) -> dict[str, Any]:
    """A question as training reads it (`trainer/search/data.py`)."""
    row = {
        "id": question.id,
        "question": question.question,
        "reference_answer": question.reference_answer,
        "file_name": question.file_name,
        "reference_page": list(question.reference_pages),
        "alternatives": {page: list(of) for page, of in question.alternatives.items()},
        "question_type": question.question_type,
        "max_turns": question.max_turns,
        "temperature": question.temperature,
        "n_agent": question.n_agent,
        **changed,
    }
    return {name: value for name, value in row.items() if value not in (None, "", [], {})}


def refs(prompt: CuratedPrompt) -> list[str]:
    """The episodes behind a prompt."""
    return [sample.ref for sample in prompt.samples]


def check_out(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError where something stands there that may not go. inputs: what is read."""
    if out.resolve() in [one.resolve() for one in inputs]:
        raise UserError(f"{out}: is read, and would be replaced: name another --out")
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").is_file()):
        raise UserError(f"{out}: is none of these commands' folders: name a new one with --out")
    if any(out.iterdir()) and not overwrite:
        raise UserError(f"{out}: is there already: --overwrite, or another --out")


def write_curated(
    out: Path,
    made: Curated,
    page: str,
    fill: Callable[[Path], None] | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the folder, in the place of an earlier one. fill: writes the rows into it, where they
    are more than is held in memory. more: further files, name -> content. What a command that was
    killed was writing there goes."""
    remove_temporaries(out.parent, escape(out.name))
    with replacing_folder(out) as folder:
        if fill is None:
            write_table(folder / "rows", made.rows)
        else:
            fill(folder)
        write_table(folder / "decisions", (one.line() for one in made.decisions))
        manifest = json.dumps(made.manifest(), ensure_ascii=False, indent=1)
        (folder / "manifest.json").write_text(manifest + "\n", encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
        if made.record is not None:
            for one in made.decisions:
                made.record.update(entries_of(made.command, one.line()))
            made.record.write(folder / FILE)
        for name, content in more.items():
            (folder / name).write_bytes(content)


def write_table(stem: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """The same rows as JSON lines and as Parquet, some in memory at a time; mappings are JSON texts
    in Parquet, whose columns have one type each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines, schema = stem.with_suffix(".jsonl"), pa.schema([])
    with lines.open("w", encoding="utf-8") as file:
        for group in in_groups(rows, _AT_ONCE):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in group)
            names = dict.fromkeys(name for row in group for name in row)
            found = pa.table(_columns(group, names)).schema
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
    schema = schema if schema.names else pa.schema([("id", pa.string())])
    with (
        lines.open(encoding="utf-8") as file,
        pq.ParquetWriter(stem.with_suffix(".parquet"), schema, compression="zstd") as table,
    ):
        for group in in_groups(map(json.loads, file), _AT_ONCE):
            table.write_table(pa.table(_columns(group, schema.names), schema=schema))


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [_cell(row.get(name)) for row in rows] for name in names}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value


def decisions_digest(folder: Path) -> str:
    """SHA-256 of what a command has decided."""
    with (folder / "decisions.jsonl").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_decisions(
    folder: Path, command: str | None
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """(manifest, lines of decisions.jsonl) of what another command has left; None: any of them.

    Raises UserError where the folder is not that command's.
    """
    name = command or "COMMAND"
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: no folder that `search {name}` has written") from None
    found = manifest.get("command") if isinstance(manifest, dict) else None
    if found is None or command not in (None, found):
        raise UserError(f"{folder}: is not of `search {name}`, but of {found!r}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{folder}: of another version of these commands: write it anew")
    return manifest, _lines(folder / "decisions.jsonl")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                whole = isinstance(row, dict) and isinstance(row.get("id"), str)
                if not whole or not isinstance(row.get("kept"), bool):
                    raise UserError(f"{path}, line {number}: is no row of decisions")
                yield row
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def shares(decisions: Iterable[Decision]) -> list[tuple[str, int]]:
    """(reason, rows), in the order in which reasons come first."""
    return list(Counter(one.reason for one in decisions).items())
