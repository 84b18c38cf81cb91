"""Rows of files, folders and `datasets`: each comes with a name for error messages.

JSON Lines, a JSON array, CSV (quoted as RFC 4180 has it), TSV (no quoting: a tab ends a cell, a
line end a row), all of them also as `.gz`; Parquet. A folder may hold a file for each split, one
split in shards (`train-00000-of-00004.parquet`, also in `data/` or in a folder of the split's
name), or what `datasets` wrote.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scorekit.errors import UserError

Rows = Iterator[tuple[str, Any]]
#: train-00000-of-00004, part-3: what comes before the number, the number, and of how many.
_SHARD = re.compile(r"((?P<front>.+?)[-_.])??(?P<number>\d+)(-of-(?P<count>\d+))?")


def read_rows(source: str, split: str | None = None, name: str | None = None) -> Rows:
    """(where it stands, row) of a file, a folder or a hub dataset.

    split: part of a folder or dataset. name: configuration of a dataset on the hub, or of a local
    copy of one. Raises UserError that names file and row.
    """
    path = Path(source)
    if path.is_dir() and name is None:
        yield from _folder_rows(path, split)
    elif not path.is_dir() and (path.is_file() or kind_of(path) in _READERS):
        for what, given in (("split", split), ("configuration", name)):
            if given is not None:
                raise UserError(f"{source}: a single file has no {what} {given!r}; name a folder")
        yield from _file_rows(path)
    elif not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise UserError(f"{source}: no such file or folder")
    else:
        yield from _dataset_rows(source, split, name, on_disk=False)


def kind_of(path: Path) -> str:
    """The ending that says how a file is read; that before `.gz`, where it is compressed."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _file_rows(path: Path) -> Rows:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        yield from _READERS.get(kind_of(path), _json_lines)(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not gzip that can be read: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[Any]:
    """The text of a file, without a byte order mark."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            yield file
        return
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        yield file


def _json_lines(path: Path) -> Rows:
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _parse(line, f"{where}: not JSON, one object a line")


def _json(path: Path) -> Rows:
    """An array of objects; else JSON Lines."""
    with _opened(path) as file:
        start = file.read(4096).lstrip()[:1]
    if start != "[":
        yield from _json_lines(path)
        return
    with _opened(path) as file:
        rows = _parse(file.read(), f"{path}: not JSON")
    for number, row in enumerate(rows, 1):
        yield f"{path} entry {number}", row


def _parse(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{fault}: {why}") from None


def _csv(path: Path) -> Rows:
    with _opened(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            lines = ((reader.line_num, cells) for cells in reader if cells)
            yield from _table(path, lines)
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: not CSV: {error}") from None


def _tsv(path: Path) -> Rows:
    with _opened(path) as file:
        lines = ((n, line.rstrip("\n")) for n, line in enumerate(file, 1))
        yield from _table(path, ((n, line.split("\t")) for n, line in lines if line))


def _table(path: Path, lines: Iterable[tuple[int, list[str]]]) -> Rows:
    """The first line names the columns; an empty cell is None."""
    header: list[str] | None = None
    for number, cells in lines:
        if header is None:
            header = [cell.strip() for cell in cells]
            again = next((name for name in header if header.count(name) > 1), None)
            if again is not None:
                raise UserError(f"{path} line {number}: the column {again!r} stands twice")
            continue
        if len(cells) != len(header):
            raise UserError(
                f"{path} line {number}: {len(cells)} cells, the header has {len(header)}"
            )
        values = (cell or None for cell in cells)
        yield f"{path} line {number}", dict(zip(header, values, strict=True))


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not Parquet that can be read: {error}") from None


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}


def _folder_rows(path: Path, split: str | None) -> Rows:
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        yield from _dataset_rows(str(path), split, None, on_disk=True)
        return
    for file in _shards(path, split):
        yield from _file_rows(file)


def _shards(folder: Path, split: str | None) -> list[Path]:
    """The files of a split, or of the only one that a folder holds, in the order of their
    numbers. Raises UserError where there is none, more than one, or a shard is missing."""
    files = [*_data_files(folder), *_data_files(folder / "data")]
    whole = [file for file in files if _stem(file) == split]
    if whole:
        return [min(whole, key=lambda file: list(_READERS).index(kind_of(file)))]
    if split is not None and (folder / split).is_dir():
        return _in_order(folder / split, _data_files(folder / split))
    by_split: dict[str, list[Path]] = {}
    for file in files:
        shard = _SHARD.fullmatch(_stem(file))
        by_split.setdefault((shard["front"] or "") if shard else _stem(file), []).append(file)
    if split is None and len(by_split) != 1:
        there = f"; it holds {', '.join(sorted(by_split))}" if by_split else ""
        raise UserError(f"{folder}: name the split of this folder (a file <split>.jsonl){there}")
    chosen = next(iter(by_split)) if split is None else split
    if chosen not in by_split:
        endings = ", ".join(_READERS)
        raise UserError(f"{folder}: has no {split}.jsonl, nor that name with one of {endings}")
    return _in_order(folder, by_split[chosen])


def _data_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*") if f.is_file() and kind_of(f) in _READERS)


def _stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem


def _in_order(folder: Path, files: list[Path]) -> list[Path]:
    """Shards by their numbers. Raises UserError where one is missing or they are of two kinds."""
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) != 1:
        told = " and ".join(kinds) if kinds else "no file that can be read"
        raise UserError(f"{folder}: holds {told}: name one file")
    shards = [(_SHARD.fullmatch(_stem(file)), file) for file in files]
    counts = {int(shard["count"]) for shard, _ in shards if shard and shard["count"]}
    if counts and counts != {len(files)}:
        raise UserError(
            f"{folder}: {len(files)} of {max(counts)} shards are there, {files[0].name} first"
        )
    return [f for _, f in sorted((int(s["number"]) if s else -1, f) for s, f in shards)]


def _dataset_rows(source: str, split: str | None, name: str | None, *, on_disk: bool) -> Rows:
    import datasets
    import pyarrow

    try:
        if on_disk:
            data = datasets.load_from_disk(source)
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
            elif split is not None:
                raise UserError(f"{source}: a dataset without splits; leave the split out")
        else:
            data = datasets.load_dataset(source, name, split=split or "train")
    except KeyError:
        raise UserError(f"{source}: has no split {split or 'train'!r}") from None
    # the hub's many ways to say no
    except (OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: neither a file, a folder nor a dataset: {reason}") from None
    rows: Iterable[Any] = data
    try:
        for number, row in enumerate(rows, 1):
            yield f"{source} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from None
