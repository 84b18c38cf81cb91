"""Write the output folder of a curation command atomically; equal inputs give equal bytes.

OUT/
    rows.jsonl, rows.parquet            kept rows, in the form of training data
    decisions.jsonl, decisions.parquet  every row, kept or dropped: the reason, its stats, and its
                                        episodes
    manifest.json                       the command, its settings, digests of its inputs, counts
    record.jsonl                        only of diagnose, hallucinations and verify: all decisions
                                        so far, with those of their inputs (--record)
    report.html                         a page for people
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.files import remove_temporaries, replacing_folder
from scorekit.net.addresses import without_userinfo
from trainer.search.curation.disk_spool import DiskSpool, in_groups
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, digest_of
from trainer.search.data import gold_pages
from trainer.search.records import Question
from trainer.sft.curation_record import FILE, CurationRecord, RecordEntry, Verdict

SCHEMA_VERSION = 1
#: Commands whose decisions are part of the record.
DECIDE: Final = ("diagnose", "hallucinations", "verify")
#: Kinds of answers without a gold page whose visible images have the fact.
_EVIDENT: Final = ("same_document", "same_data")
_AT_ONCE = 200  # max rows in memory and in a row group of Parquet


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a row. reason: one of the command's fixed texts, by which rows are
    counted. stats: the values behind it. episodes: run/trajectory of its episodes."""

    row_id: str
    is_kept: bool
    reason: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    episodes: Sequence[str] = ()

    def line(self) -> dict[str, Any]:
        """Return the row of decisions.jsonl."""
        head = {"id": self.row_id, "kept": self.is_kept, "reason": self.reason}
        return {**head, **self.stats, "episodes": list(self.episodes)}


@dataclass(slots=True)
class CurationResult:
    """The result of a command before it is written.

    command: its name. settings: its config section. runs: the runs that were read. inputs: other
    files, name -> digest. manifest_extra: further keys of the manifest. record: earlier decisions,
    if the command adds to them. rows: kept rows. decisions: of all rows.
    """

    command: str
    settings: BaseModel
    runs: Sequence[CuratedRun]
    inputs: Mapping[str, str] = field(default_factory=dict)
    manifest_extra: Mapping[str, Any] = field(default_factory=dict)
    record: CurationRecord | None = None
    rows: DiskSpool[dict[str, Any]] = field(default_factory=lambda: DiskSpool(dict), init=False)
    decisions: DiskSpool[Decision] = field(default_factory=lambda: DiskSpool(Decision), init=False)

    def manifest(self) -> dict[str, Any]:
        """Return the content of manifest.json."""
        reasons = Counter((decision.is_kept, decision.reason) for decision in self.decisions)
        num_kept = sum(count for (is_kept, _), count in reasons.items() if is_kept)
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "settings": without_userinfo(self.settings.model_dump(mode="json")),
            "runs": [
                {
                    "folder": str(run.folder),
                    "run": run.name,
                    "episodes": run.episodes,
                    "sha256": run.digest,
                }
                for run in self.runs
            ],
            "inputs": dict(self.inputs),
            "counts": {
                "rows": reasons.total(),
                "kept": num_kept,
                "dropped": reasons.total() - num_kept,
                "reasons": {
                    ("kept: " if is_kept else "dropped: ") + reason: count
                    for (is_kept, reason), count in sorted(reasons.items())
                },
            },
            **self.manifest_extra,
        }


def question_row(question: Question, **changed: Any) -> dict[str, Any]:
    """Return a question as a row of training data (`trainer/search/data.py`)."""
    are_numbered = question.gold == gold_pages(question.file_name, question.reference_pages)
    row = {
        "id": question.id,
        "question": question.question,
        "reference_answer": question.reference_answer,
        "reference_answers": list(question.reference_answers) if question.other_answers else [],
        "file_name": question.file_name,
        "reference_page": list(question.reference_pages),
        "gold_pages": [] if are_numbered else list(question.gold),
        "alternatives": {page: list(pages) for page, pages in question.alternatives.items()},
        "question_type": question.question_type,
        "max_turns": question.max_turns,
        "temperature": question.temperature,
        "n_agent": question.n_agent,
        **changed,
    }
    return {name: value for name, value in row.items() if value not in (None, "", [], {})}


def refs(prompt: CuratedPrompt) -> list[str]:
    """Return the ids of a question's episodes."""
    return [sample.ref for sample in prompt.samples]


def check_out(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError if `out` must not be replaced. inputs: paths that the command reads."""
    if out.resolve() in [path.resolve() for path in inputs]:
        raise UserError(
            f"{out}: an input of the command, which would be replaced. Name another --out."
        )
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").is_file()):
        raise UserError(f"{out}: not a folder of a curation command. Name a new one with --out.")
    if any(out.iterdir()) and not overwrite:
        raise UserError(f"{out}: already exists. Set --overwrite, or name another --out.")


def write_curated(
    out: Path,
    result: CurationResult,
    page: str,
    fill: Callable[[Path], None] | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the folder and replace an earlier one; remove leftovers of killed commands.

    fill: writes the rows into it if they do not fit in memory. more: further files, name ->
    content.
    """
    remove_temporaries(out.parent, escape(out.name))
    with replacing_folder(out) as folder:
        if fill is None:
            write_table(folder / "rows", result.rows)
        else:
            fill(folder)
        write_table(folder / "decisions", (decision.line() for decision in result.decisions))
        manifest = json.dumps(result.manifest(), ensure_ascii=False, indent=1)
        (folder / "manifest.json").write_text(manifest + "\n", encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
        if result.record is not None:
            for decision in result.decisions:
                result.record.update(entries_of(result.command, decision.line()))
            result.record.write(folder / FILE)
        for name, content in more.items():
            (folder / name).write_bytes(content)


def write_table(stem: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines and as Parquet, in batches.

    Parquet has mappings as JSON texts, because a column has one type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines, schema = stem.with_suffix(".jsonl"), pa.schema([])
    with lines.open("w", encoding="utf-8") as file:
        for group in in_groups(rows, _AT_ONCE):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in group)
            names = dict.fromkeys(name for row in group for name in row)
            group_schema = pa.table(_columns(group, names)).schema
            schema = pa.unify_schemas([schema, group_schema], promote_options="permissive")
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
    """Return the SHA-256 of a command's decisions.jsonl."""
    return digest_of(folder / "decisions.jsonl")


def read_decisions(
    folder: Path, command: str | None
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return (manifest, rows of decisions.jsonl) of a command's folder.

    command: None: any command. Raises UserError if the folder is of another command.
    """
    name = command or "COMMAND"
    try:
        manifest = parse_json((folder / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: not a folder of `search {name}`") from None
    actual = manifest.get("command") if isinstance(manifest, dict) else None
    if actual is None or command not in (None, actual):
        raise UserError(f"{folder}: a folder of {actual!r}, not of `search {name}`")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{folder}: written by another version. Run the command again.")
    return manifest, _lines(folder / "decisions.jsonl")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = parse_json(line)
                has_id = isinstance(row, dict) and isinstance(row.get("id"), str)
                if not has_id or not isinstance(row.get("kept"), bool):
                    raise UserError(f"{path}, line {number}: not a row of decisions")
                yield row
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


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
