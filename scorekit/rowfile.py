"""Rows of a file, one by one: JSON lines, TSV, CSV or Parquet, plain or gzipped, or from stdin."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

from pydantic_core import from_json

from scorekit.errors import UserError

Format = Literal["jsonl", "tsv", "csv", "parquet"]
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
#: Longest cell of a CSV; the csv module's own limit is 131,072 characters.
_MOST_CHARACTERS = 2**30


class Row(NamedTuple):
    """number: of the line it begins on, of a Parquet file the row's; from 1."""

    number: int
    fields: dict[str, Any]


class RowFile:
    """A file with a row a line: JSON objects; a TSV with a header and no quoting; a CSV with a
    header and the usual quotes; or Parquet. Blank lines are skipped. gzip is known by its first
    bytes. `-` is stdin, which is kept in a temporary file, so that it can be read again.
    """

    def __init__(
        self, path: Path, format: Format | None = None, *, remedy: str = "rename it"
    ) -> None:
        """format: default by the file's ending, of stdin JSON lines. Raises UserError, with what
        can be done about it, where the ending says nothing."""
        self._spool: BinaryIO | None = None
        self.is_stdin = str(path) == "-"
        self.path = Path("stdin") if self.is_stdin else path
        endings = [ending.lower().lstrip(".") for ending in path.suffixes[-2:]]
        if endings and endings[-1] == "gz":
            endings.pop()
        found = "jsonl" if self.is_stdin else endings[-1] if endings else ""
        if format is None and found not in get_args(Format):
            known = ", ".join(f".{name}" for name in get_args(Format))
            raise UserError(f"{path}: its ending is none of {known}: {remedy}")
        self.format = format or found

    def digest(self) -> str:
        """A digest of the (unzipped) content. Raises UserError."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            with self._open() as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except (OSError, EOFError, zlib.error) as error:
            raise self._fault(0, error) from None
        return digest.hexdigest()

    def rows(self, once: Sequence[str], columns: Sequence[str] | None) -> Iterator[Row]:
        """The rows in order.

        once: columns that a header must have once. columns: those that are wanted; None: all,
        and none may stand twice. Raises UserError that names the first line which is no row.
        """
        read = {"jsonl": _json_rows, "tsv": _tsv_rows, "csv": _csv_rows}.get(self.format)
        number = 0
        try:
            with self._open() as file:
                rows = read(file, once, columns) if read else _parquet_rows(file, columns)
                while True:
                    try:
                        number, fields = next(rows)
                    except StopIteration:
                        return
                    except _Fault as fault:
                        number = fault.number
                        raise ValueError(str(fault)) from None
                    yield Row(number, fields)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise self._fault(number, error) from None

    def _fault(self, number: int, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"{self.path}: {error.strerror}")
        if isinstance(error, OSError | EOFError | zlib.error):
            return UserError(f"{self.path}: the gzip is damaged: {error}")
        where = f", {'row' if self.format == 'parquet' else 'line'} {number}" if number else ""
        return UserError(f"{self.path}{where}: {error}")

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self._open_raw() as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file

    def _open_raw(self) -> BinaryIO:
        if not self.is_stdin:
            return self.path.open("rb")
        if self._spool is None:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115
            shutil.copyfileobj(sys.stdin.buffer, self._spool)
        self._spool.flush()
        self._spool.seek(0)
        return os.fdopen(os.dup(self._spool.fileno()), "rb")


class _Fault(ValueError):
    """What is wrong with the row that begins on line `number`."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def _json_rows(
    file: BinaryIO, once: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in _lines(file):
        try:
            found = from_json(text)
        except ValueError as error:
            what = str(error).replace("at line 1 column", "at column")
            raise _Fault(number, f"not JSON: {what}") from None
        if not isinstance(found, dict):
            raise _Fault(number, "not a JSON object")
        yield number, found


def _tsv_rows(
    file: BinaryIO, once: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    header: list[str] | None = None
    for number, text in _lines(file):
        cells = text.split("\t")
        if header is None:
            header = _header(number, cells, once, columns)
        else:
            yield number, _row(number, header, cells)


def _csv_rows(
    file: BinaryIO, once: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(_MOST_CHARACTERS)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise _Fault(number, str(error)) from None
        if cells is None:
            return
        if not cells or (len(cells) == 1 and not cells[0].strip()):
            continue
        if header is None:
            header = _header(number, cells, once, columns)
        else:
            yield number, _row(number, header, cells)


def _parquet_rows(
    file: BinaryIO, columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("to read Parquet, install pyarrow: pip install pyarrow") from None
    number = before = 0
    try:
        table = ParquetFile(file)
        wanted = None if columns is None else [c for c in table.schema_arrow.names if c in columns]
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            for number, fields in enumerate(batch.to_pylist(), before + 1):
                yield number, fields
            before = number
    except ArrowException as error:
        raise _Fault(number, f"not Parquet: {error}") from None


def _lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(file, 1):
        try:
            text = raw.removeprefix(_BOM).decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise _Fault(number, str(error)) from None
        if text.strip(" \t"):
            yield number, text


def _header(
    number: int, cells: list[str], once: Sequence[str], columns: Sequence[str] | None
) -> list[str]:
    twice = [name for name in cells if name and cells.count(name) > 1] if columns is None else []
    for column in (*once, *twice):
        if cells.count(column) != 1:
            what = f"the header has {cells.count(column)} columns {column!r}, not one"
            raise _Fault(number, what)
    return cells


def _row(number: int, header: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(header):
        raise _Fault(number, f"{len(cells)} columns, the header has {len(header)}")
    return dict(zip(header, cells, strict=True))
