"""Read the decisions about rows of earlier steps and of people."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from scorekit.documents import parse_json
from scorekit.errors import UserError
from trainer.search.steps.episodes import CuratedPrompt, digest_of
from trainer.search.steps.options import CurationOptions
from trainer.search.steps.table import recording, step
from trainer.sft.curation_record import (
    EXCLUDE,
    FILE,
    CurationRecord,
    RecordEntry,
    read_record,
)

log = logging.getLogger(__name__)
#: Version of the folders of all steps.
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class PriorDecisions:
    """Decisions of earlier commands and of people.

    buckets: id -> bucket, of `search buckets`; None: compute them from the episodes.
    record: decisions about rows and episodes.
    inputs: path -> digest of what was read.
    """

    buckets: Mapping[str, str] | None = None
    record: CurationRecord = field(default_factory=CurationRecord)
    inputs: Mapping[str, str] = field(default_factory=dict)


def read_prior(ids: set[str] | None, options: CurationOptions) -> PriorDecisions:
    """Return the decisions in folders and files. A later one overrules an earlier one of a step.

    ids: of the data; None: any.
    options: `buckets` is a folder of this step; `verified`: folders of `verify`, of which only its
    own decisions count. exclude: files, see `_excluded`. record: folders of steps with decisions,
    or their record.jsonl; a folder that an earlier version wrote has none, and is read by its
    decisions.
    Raises UserError if one is of another step or of other data.
    """
    buckets: Path | None = options.further.get("buckets")
    record = CurationRecord()
    inputs: dict[str, str] = {}
    sorted_into: dict[str, str] | None = None
    if buckets is not None:
        _, lines = read_decisions(buckets, "buckets")
        sorted_into = {row["id"]: str(row.get("bucket")) for row in lines}
        if missing := sorted((ids or set()) - sorted_into.keys()):
            raise UserError(
                f"{buckets}: has no bucket of {len(missing)} rows ({missing[0]} first). It was "
                "made from other data."
            )
        inputs[str(buckets)] = decisions_digest(buckets)
    for path in options.record or ():
        if path.is_file() or (path / FILE).is_file():
            entries = list(read_record(path))
            inputs[str(path)] = digest_of(path if path.is_file() else path / FILE)
        else:
            entries = _decided(path)
            inputs[str(path)] = decisions_digest(path)
        _check_known(path, {entry.question_id for entry in entries}, ids)
        record.update(entries)
    for folder in options.verified or ():
        _, lines = read_decisions(folder, "verify")
        rows = list(lines)
        _check_known(folder, (row["id"] for row in rows), ids)
        record.update(entry for row in rows for entry in step("verify").entries(row))
        inputs[str(folder)] = decisions_digest(folder)
    for path in options.exclude or ():
        named, inputs[str(path)] = _excluded(path)
        _check_known(path, named, ids)
        record.update(RecordEntry(id, EXCLUDE, "drop", reason) for id, reason in named.items())
    return PriorDecisions(sorted_into, record, inputs)


def _decided(folder: Path) -> list[RecordEntry]:
    """Return the entries of a folder without a record.jsonl."""
    manifest, lines = read_decisions(folder, None)
    name = str(manifest["command"])
    if name not in recording():
        raise UserError(
            f"{folder}: `search {name}` decides nothing about rows. Name a folder of "
            f"{', '.join(recording())}."
        )
    return [entry for row in lines for entry in step(name).entries(row)]


def only_kept(
    prompts: Sequence[CuratedPrompt], folder: Path | None, decided: PriorDecisions
) -> tuple[list[CuratedPrompt], PriorDecisions]:
    """Return the prompts whose rows a command kept, and the decisions with its folder as an input.

    folder: None: all prompts.
    """
    if folder is None:
        return list(prompts), decided
    _, lines = read_decisions(folder, None)
    ids = {row["id"] for row in lines if row["kept"]}
    chosen = [prompt for prompt in prompts if prompt.question.id in ids]
    if len(chosen) < len(ids):
        missing = sorted(ids - {prompt.question.id for prompt in chosen})
        raise UserError(
            f"{folder}: {len(missing)} of its rows are not in the data ({missing[0]} first)"
        )
    inputs = {**decided.inputs, str(folder): decisions_digest(folder)}
    return chosen, replace(decided, inputs=inputs)


def _excluded(path: Path) -> tuple[dict[str, str], str]:
    """Return (id -> reason, digest) of a file with lines `id`, tab, reason; # starts a comment."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    parts = (line.partition("\t") for line in lines if line.strip() and line[0] != "#")
    named = {id.strip(): reason.strip() for id, _, reason in parts}
    return named, hashlib.sha256(content).hexdigest()


def _check_known(path: Path, named: Iterable[str], ids: set[str] | None) -> None:
    """Warn of ids that are not in the data. Raises UserError if no id is in it."""
    if ids is None:
        return
    names = set(named)
    foreign = sorted(names - ids)
    if foreign and len(foreign) == len(names):
        raise UserError(f"{path}: the data has none of its {len(names)} ids ({foreign[0]!r} first)")
    if foreign:
        log.warning("%s: %d of %d ids are not in the data", path, len(foreign), len(names))


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
