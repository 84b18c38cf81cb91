"""Files of the export: which rows they contain, and how they are written.

A file's records follow from its number and the shards' marks. So processes can write files in
parallel, and a killed export continues with the missing ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synth.config import SynthConfig
from synth.export.rows import arrow_schema, pair_codes, pair_row, pair_schema, row_maker
from synth.storage.parquet import ParquetFile
from synth.storage.store import Record, ShardWriter, StageFolder, digest_of, read_records

if TYPE_CHECKING:
    import pyarrow

#: Name of the stage, and of its folder in the folder of the run.
FOLDER = "export"
TRAIN, PAIRS = "train", "pairs"
_BATCH = 5000  # rows of a Parquet row group


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The records start..stop-1 of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FileJob:
    """The rows of file `number` of `total`.

    folder: for the written files.
    metricx: the scoring service's info.
    """

    cfg: SynthConfig
    source: StageFolder
    folder: Path
    slices: tuple[ShardSlice, ...]
    number: int
    total: int
    metricx: dict[str, Any]


def plan_files(
    source: StageFolder, rows_per_file: int, limit: int | None
) -> list[list[ShardSlice]]:
    """Return the slices of each file in order; one empty file if there are no records."""
    plan: list[list[ShardSlice]] = [[]]
    remaining = rows_per_file
    for shard in range(source.shards() or 0):
        records = (source.mark(shard) or {})["records"]
        if limit is not None:
            records = min(records, limit)
            limit -= records
        start = 0
        while start < records:
            if not remaining:
                plan.append([])
                remaining = rows_per_file
            stop = min(records, start + remaining)
            plan[-1].append(ShardSlice(shard, start, stop))
            remaining -= stop - start
            start = stop
    return plan


def file_name(name: str, kind: str, number: int, total: int) -> str:
    """Return the file's name as on the hub; a single file has no number.

    kind: jsonl, parquet.
    """
    if total == 1:
        return f"{name}.{kind}"
    return f"{name}-{number:05d}-of-{total:05d}.{kind}{'.zst' if kind == 'jsonl' else ''}"


def write_files(job: FileJob) -> dict[str, Any]:
    """Write the files of one number; return their mark.

    A file is {"name", "of" ("train" or "pairs"), "rows", "bytes", "sha256"}, of Parquet with
    "memory", the bytes of its columns when they are loaded. Raises UserError for a changed shard,
    ValueError for a row that does not fit the schema.
    """
    make = row_maker(job.cfg, job.metricx)
    files = _write(job, TRAIN, map(make, _records(job)), arrow_schema())
    records = files[0]["rows"]
    if job.cfg.export.preference_pairs:
        codes = pair_codes(job.cfg)
        pairs = (row for r in _records(job) if (row := pair_row(codes, r)) is not None)
        files += _write(job, PAIRS, pairs, pair_schema())
    digest = digest_of([file["sha256"] for file in files])
    return {"records": records, "rejected": {}, "digest": digest, "files": files}


def is_written(mark: dict[str, Any] | None, folder: Path) -> bool:
    """Return True if the folder has the files of a mark, unchanged."""
    return mark is not None and not changed_files(folder, mark["files"])


def changed_files(folder: Path, files: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names of files that are missing or changed."""
    return [
        file["name"]
        for file in files
        if not (path := folder / file["name"]).exists() or sha256_of(path) != file["sha256"]
    ]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex, as `sha256sum` does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _records(job: FileJob) -> Iterator[Record]:
    for shard_slice in job.slices:
        job.source.verify_input(shard_slice.shard)
        yield from islice(
            read_records(job.source.shard(shard_slice.shard)), shard_slice.start, shard_slice.stop
        )


def _write(
    job: FileJob, name: str, rows: Iterable[Record], columns: pyarrow.Schema
) -> list[dict[str, Any]]:
    """Write the requested formats in one pass; return a description of each file."""
    remaining_rows = iter(rows)
    path = {
        kind: job.folder / file_name(name, kind, job.number, job.total)
        for kind in sorted(set(job.cfg.export.formats))
    }
    count = 0
    with ExitStack() as stack:
        lines: ShardWriter | None = None
        table: ParquetFile | None = None
        if "jsonl" in path:
            lines = stack.enter_context(ShardWriter(path["jsonl"]))
        if "parquet" in path:
            table = stack.enter_context(ParquetFile(path["parquet"], columns, "zstd"))
        while batch := list(islice(remaining_rows, _BATCH)):
            count += len(batch)
            if lines is not None:
                for row in batch:
                    lines.write(row)
            if table is not None:
                table.write(batch)
        for writer in (lines, table):
            if writer is not None:
                writer.commit()
    written = [
        {
            "name": file.name,
            "of": name,
            "rows": count,
            "bytes": file.stat().st_size,
            "sha256": sha256_of(file),
        }
        for file in path.values()
    ]
    if table is not None:
        written[-1]["memory"] = table.memory
    return written
