"""Rows of files, folders and `datasets`, each with a name for error messages.

Files are those of scorekit/rows/read.py, but for `.txt`. A folder may have a file for each split,
one split in shards (`train-00000-of-00004.parquet`, also in `data/` or in a folder of the split's
name), or what `datasets` wrote.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from scorekit.errors import UserError
from scorekit.rows.read import Format, RowFile
from scorekit.rows.samples import MAX_LISTED, BadRows

Rows = Iterator[tuple[str, Any]]
#: Ending -> format.
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
#: train-00000-of-00004, part-3: the text before the number, the number, and the count.
_SHARD = re.compile(r"((?P<front>.+?)[-_.])??(?P<number>\d+)(-of-(?P<count>\d+))?")


class HasId(Protocol):
    """A row; its id may be empty."""

    @property
    def id(self) -> str:
        """Return its own id."""
        ...


log = logging.getLogger(__name__)
R = TypeVar("R", bound=HasId)
T = TypeVar("T")


def read_rows(
    source: str, split: str | None = None, name: str | None = None, *, with_bad: bool = False
) -> Rows:
    """Yield (location, row) of a file, a folder or a hub dataset.

    split: part of a folder or dataset.
    name: configuration of a dataset on the hub, or of a local copy of one.
    with_bad: yield a UserError in place of a row of a file that is none, for `parse_rows`.
    Raises UserError that names file and row.
    """
    path = Path(source)
    if path.is_dir() and name is None:
        yield from _folder_rows(path, split, with_bad)
    elif not path.is_dir() and (path.is_file() or kind_of(path) in _FORMATS):
        for label, value in (("split", split), ("configuration", name)):
            if value is not None:
                raise UserError(f"{source}: a single file has no {label} {value!r}. Name a folder")
        yield from _file_rows(path, with_bad)
    elif not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise UserError(f"{source}: no such file or folder")
    else:
        yield from _dataset_rows(source, split, name, on_disk=False)


def parse_rows(
    source: str,
    rows: Iterable[tuple[str, Any]],
    parse: Callable[[Any, str], T],
    bad_rows: BadRows = "refuse",
) -> list[T]:
    """Return what `parse` makes of each row, which has to be an object, and its location.

    bad_rows: as for `report_bad_rows`. Raises UserError as it does, or if there are no rows.
    """
    results, errors = [], []
    for location, row in rows:
        try:
            results.append(parse(object_of(row, location), location))
        except UserError as error:
            errors.append(str(error))
    report_bad_rows(source, errors, len(errors) + len(results), bad_rows)
    if not results:
        raise UserError(f"{source}: no rows")
    return results


def report_bad_rows(source: str, errors: Sequence[str], num_rows: int, bad_rows: BadRows) -> None:
    """Refuse the bad rows of a source, or warn that they are left out (data.bad_rows).

    errors: a line for each.
    num_rows: all rows, with the bad ones.
    Raises UserError with the first lines if bad rows are refused, or if no other row remains.
    """
    if not errors:
        return
    message = f"{source}: {len(errors)} of {num_rows} rows cannot be used"
    if bad_rows == "refuse" or len(errors) == num_rows:
        raise UserError(f"{message}:", shorten(errors))
    log.warning("%s, and are left out (data.bad_rows):", message)
    for line in shorten(errors):
        log.warning("%s", line)


def object_of(row: Any, location: str) -> Mapping[str, Any]:
    """Return a row of `read_rows`. Raises UserError if it is none."""
    if isinstance(row, Mapping):
        return row
    if isinstance(row, UserError):
        raise row
    kind = "an array" if isinstance(row, list) else type(row).__name__
    raise UserError(f"{location}: expected an object of fields, not {kind}")


def shorten(errors: Sequence[str]) -> list[str]:
    """Return the first errors and the number of the others: the lines of a UserError."""
    more = [f"and {len(errors) - MAX_LISTED} more"] if len(errors) > MAX_LISTED else []
    return [*errors[:MAX_LISTED], *more]


def row_ids(source: str, rows: Sequence[R], content: Callable[[R], str]) -> list[str]:
    """Return an id for each row: its own, else a digest of its content, numbered if it recurs.

    Raises UserError if an id is there twice: results are joined by it.
    """
    id_counts = Counter(row.id for row in rows if row.id)
    duplicates = [name for name, count in id_counts.items() if count > 1]
    if duplicates:
        raise UserError(
            f"{source}: {len(duplicates)} ids occur more than once, {duplicates[0]!r} first"
        )
    seen: Counter[str] = Counter()
    ids = []
    for row in rows:
        name = row.id
        if not name:
            name = hashlib.blake2b(content(row).encode(), digest_size=8).hexdigest()
            seen[name] += 1
            name += f"-{seen[name]}" if seen[name] > 1 else ""
        ids.append(name)
    return ids


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a nested one ("translation.en"); None without a value."""
    if column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    within = row.get(outer)
    return cell(within, inner) if dot and isinstance(within, dict) else None


def id_cell(value: Any, location: str, column: str) -> str | None:
    """Return the id in a cell; a whole number as text. Raises UserError."""
    if isinstance(value, float) and value.is_integer():  # a data frame with missing ids
        value = int(value)
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value is None else text_cell(str(value), location, column)
    raise UserError(f"{location}: {column}: expected a text or whole number, not {value!r:.40}")


def text_cell(value: Any, location: str, column: str) -> str | None:
    """Return the text in a cell; None without a value. Raises UserError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(f"{location}: {column}: expected a text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{location}: {column}: not valid Unicode (a lone surrogate)") from None
    return value


def clean_cell(value: Any, location: str, column: str) -> str | None:
    """Return a text that a model is to learn or a server to read, as `text_cell`.

    A text with a NUL character raises UserError, too.
    """
    text = text_cell(value, location, column)
    if text is not None and "\0" in text:
        raise UserError(f"{location}: {column}: has a NUL character. Remove it")
    return text


def kind_of(path: Path) -> str:
    """Return the file ending that defines the format; of a compressed file the one before `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _file_rows(path: Path, with_bad: bool) -> Rows:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    kind = kind_of(path)
    file = RowFile(path, _FORMATS.get(kind, "jsonl"))
    for row in file.rows(needed=(), columns=None, with_bad=with_bad):
        location = f"{path} {file.unit} {row.number}"
        bad = UserError(f"{file.location(row.number)}: {row.problem}") if row.problem else None
        yield location, bad or row.fields


def _folder_rows(path: Path, split: str | None, with_bad: bool) -> Rows:
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        yield from _dataset_rows(str(path), split, None, on_disk=True)
        return
    for file in _shards(path, split):
        yield from _file_rows(file, with_bad)


def _shards(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a split, or of the folder's only one, in the order of their numbers.

    Raises UserError if there is none, more than one, or a shard is missing.
    """
    files = [*_data_files(folder), *_data_files(folder / "data")]
    single_files = [file for file in files if _stem(file) == split]
    if single_files:
        return [min(single_files, key=lambda file: list(_FORMATS).index(kind_of(file)))]
    if split is not None and (folder / split).is_dir():
        return _in_order(folder / split, _data_files(folder / split))
    by_split = _by_split(files)
    if split is None and len(by_split) != 1:
        hint = f". It has {', '.join(sorted(by_split))}" if by_split else ""
        raise UserError(f"{folder}: name the split of this folder (a file <split>.jsonl){hint}")
    chosen = next(iter(by_split)) if split is None else split
    if chosen not in by_split:
        endings = ", ".join(_FORMATS)
        raise UserError(f"{folder}: has no {split}.jsonl, nor that name with one of {endings}")
    return _in_order(folder, by_split[chosen])


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split in a folder, the shards of one in the order of their numbers.

    Raises UserError if a shard is missing.
    """
    by_split = _by_split(_data_files(folder))
    return {split: _in_order(folder, files) for split, files in sorted(by_split.items())}


def _by_split(files: Iterable[Path]) -> dict[str, list[Path]]:
    by_split: dict[str, list[Path]] = {}
    for file in files:
        shard = _SHARD.fullmatch(_stem(file))
        by_split.setdefault((shard["front"] or "") if shard else _stem(file), []).append(file)
    return by_split


def _data_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*") if f.is_file() and kind_of(f) in _FORMATS)


def _stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem


def _in_order(folder: Path, files: list[Path]) -> list[Path]:
    """Return shards by their numbers. Raises UserError if one is missing or formats differ."""
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) != 1:
        description = " and ".join(kinds) if kinds else "no file that can be read"
        raise UserError(f"{folder}: has {description}. Name one file")
    shards = [(_SHARD.fullmatch(_stem(file)), file) for file in files]
    counts = {int(shard["count"]) for shard, _ in shards if shard and shard["count"]}
    if counts and counts != {len(files)}:
        raise UserError(
            f"{folder}: {len(files)} of {max(counts)} shards exist, {files[0].name} first"
        )
    return [f for _, f in sorted((int(s["number"]) if s else -1, f) for s, f in shards)]


def _dataset_rows(source: str, split: str | None, name: str | None, *, on_disk: bool) -> Rows:
    import datasets
    import pyarrow

    from scorekit.hub import hub_errors

    try:
        if on_disk:
            data = datasets.load_from_disk(source)
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
            elif split is not None:
                raise UserError(f"{source}: a dataset without splits. Leave the split out")
        else:
            data = datasets.load_dataset(source, name, split=split or "train")
    except KeyError:
        raise UserError(f"{source}: has no split {split or 'train'!r}") from None
    # the hub raises many types
    except (
        *hub_errors(),
        ValueError,
        RuntimeError,
        pyarrow.ArrowException,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: neither a file, a folder nor a dataset: {reason}") from None
    rows: Iterable[Any] = data
    try:
        for number, row in enumerate(rows, 1):
            yield f"{source} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from None
