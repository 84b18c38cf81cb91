"""Read the rows of a file one by one: JSON lines, TSV, CSV or Parquet, plain, gzipped or from
stdin.

A TSV is read as follows, here and by the page of a service (scorekit/server/page/rows.js):

- The first line names the columns. Cells have tabs between them, rows end with LF or CRLF.
- A cell is quoted if it begins with a quote and the next quote that is not doubled is at its end.
  The quotes are removed, "" is one quote, and the cell may contain tabs and line ends. csv.writer
  and pandas write this form.
- Every other cell is unchanged text: `"Hi," he said`, a single quote, one that is never closed.
- A line without a tab and without text is skipped.

A quoted cell that spans lines is ambiguous if each of the lines is a complete row: that is an
error, unless the cells of the header are quoted. `tsv-unquoted` reads every quote as text.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

from pydantic_core import from_json

from scorekit.errors import UserError

Ending = Literal["jsonl", "tsv", "csv", "parquet"]
Format = Literal[Ending, "tsv-unquoted"]
_BOM = b"\xef\xbb\xbf"
_ESCAPED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8
_MAX_SHOWN = 20  # columns of a header in a message, and characters of each
_NOT_UTF8 = "not UTF-8 text. Save the file as UTF-8"
_GZIP = b"\x1f\x8b"
#: Longest cell of a CSV; the csv module's own limit is 131,072 characters.
MOST_CHARACTERS = 2**30
#: Largest distance, in characters, to the end of a quoted cell that spans lines of a TSV.
_MAX_AHEAD = 2**24
#: Up to the next quote that is not doubled.
_TO_QUOTE = re.compile(r'(?:[^"]++|"")*+"')
_CELL_ENDS = re.compile(r"\t|\r?\n|\r?\Z")

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row. number: the line it begins on, or of a Parquet file the row's number; from 1."""

    number: int
    fields: dict[str, Any]


class RowFile:
    """A file with one row per line: JSON objects, a TSV or a CSV with a header, or Parquet.

    Blank lines are skipped. gzip is detected by its first bytes. `-` is stdin, which is copied to a
    temporary file so that it can be read more than once.
    """

    def __init__(
        self, path: Path, format: Format | None = None, *, remedy: str = "rename it"
    ) -> None:
        """Raise UserError, with `remedy`, if the file's ending names no format.

        format: default by the file's ending; JSON lines for stdin."""
        self._spool: BinaryIO | None = None
        self._warned = False
        self.is_stdin = str(path) == "-"
        self.path = Path("stdin") if self.is_stdin else path
        endings = [ending.lower().lstrip(".") for ending in path.suffixes[-2:]]
        if endings and endings[-1] == "gz":
            endings.pop()
        ending = "jsonl" if self.is_stdin else endings[-1] if endings else ""
        if format is None and ending not in get_args(Ending):
            valid_endings = ", ".join(f".{name}" for name in get_args(Ending))
            raise UserError(f"{path}: its ending is none of {valid_endings}: {remedy}")
        self.format = format or ending

    def digest(self) -> str:
        """Return a digest of the (unzipped) content. Raises UserError."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            with self._open() as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except (OSError, EOFError, zlib.error) as error:
            raise self._as_user_error(0, error) from None
        return digest.hexdigest()

    def rows(self, once: Sequence[str], columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield the rows in order.

        once: columns that a header must have exactly once. columns: those to return; None: all, and
        no duplicates. Raises UserError that names the first invalid row.
        """
        number = 0
        try:
            with self._open() as file:
                rows = self._read(file, once, columns)
                while True:
                    try:
                        number, fields = next(rows)
                    except StopIteration:
                        return
                    except _RowError as row_error:
                        number = row_error.number
                        raise ValueError(str(row_error)) from None
                    yield Row(number, fields)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise self._as_user_error(number, error) from None

    def _read(
        self, file: BinaryIO, once: Sequence[str], columns: Sequence[str] | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if self.format == "jsonl":
            yield from _json_rows(file)
        elif self.format == "parquet":
            yield from _parquet_rows(file, columns)
        elif self.format == "tsv":
            tsv = _Tsv(file)
            yield from _rows_below(tsv.records(), once, columns)
            self._warn(tsv)
        else:
            records = _csv_records(file) if self.format == "csv" else _unquoted_records(file)
            yield from _rows_below(records, once, columns)

    def _warn(self, tsv: _Tsv) -> None:
        """Warn once if some cells were unquoted and others hold quotes as text.

        A program that quotes cells quotes every cell that contains a quote."""
        if tsv.quoted and tsv.with_quotes and not self._warned:
            self._warned = True
            log.warning(
                "%s: %d cells are quoted, and their quotes were taken off; %d hold quotes as text. "
                "If nothing in this file is quoted, save it as JSON lines "
                "(`scorekit score` also reads it with --format tsv-unquoted).",
                self.path,
                tsv.quoted,
                tsv.with_quotes,
            )

    def _as_user_error(self, number: int, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"{self.path}: {error.strerror}")
        if isinstance(error, OSError | EOFError | zlib.error):
            return UserError(f"{self.path}: the gzip is damaged: {error}")
        location = f", {'row' if self.format == 'parquet' else 'line'} {number}" if number else ""
        return UserError(f"{self.path}{location}: {error}")

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self._open_raw() as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            if is_gzip:
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield cast(BinaryIO, unzipped)
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


class _RowError(ValueError):
    """The row that begins on line `number` is invalid."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def _json_rows(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in _lines(file):
        try:
            row = from_json(text)
        except ValueError as error:
            reason = str(error).replace("at line 1 column", "at column")
            raise _RowError(number, f"not JSON: {reason}") from None
        if not isinstance(row, dict):
            raise _RowError(number, "not a JSON object")
        yield number, row


def _rows_below(
    records: Iterator[tuple[int, list[str]]], once: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows below the first one, which is the header."""
    header: list[str] | None = None
    for number, cells in records:
        if header is None:
            header = _header(number, cells, once, columns)
        elif len(cells) != len(header):
            raise _RowError(number, f"{len(cells)} columns, the header has {len(header)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _unquoted_records(file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    for number, text in _lines(file):
        yield number, text.split("\t")


def _csv_records(file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MOST_CHARACTERS)
    # The decoder reads ahead, so an invalid byte is reported only in its row.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise _RowError(number, str(error)) from None
        if cells is not None and any(map(_ESCAPED.search, cells)):
            raise _RowError(number, _NOT_UTF8)
        if cells is None:
            return
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield number, cells


class _Tsv:
    """A TSV whose cells may be quoted: the top of this file has the rules.

    quoted: number of cells that were unquoted so far. with_quotes: number of others that contain a
    quote.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.quoted = self.with_quotes = 0
        self._file = file
        self._ahead: deque[str] = deque()  # lines that were read but not consumed
        self._number = 0  # number of the line consumed last
        self._columns: int | None = None  # columns of a row, if multi-line cells may be a mistake

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of the first line, cells) of the header and of each row."""
        is_header = True
        while line := self._line(0):
            self._take(1)
            number = self._number
            cells = self._cells(line)
            if len(cells) > 1 or cells[0].strip():
                if is_header and self.quoted < len(cells):
                    self._columns = len(cells)
                is_header = False
                yield number, cells

    def _line(self, ahead: int) -> str:
        """Return a line with its end, `ahead` lines after the next one; empty after the last."""
        while len(self._ahead) <= ahead:
            raw = self._file.readline()
            number = self._number + len(self._ahead) + 1
            try:
                text = raw.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError:
                raise _RowError(number, _NOT_UTF8) from None
            self._ahead.append(text)
        return self._ahead[ahead]

    def _take(self, lines: int) -> None:
        for _ in range(lines):
            self._ahead.popleft()
        self._number += lines

    def _cells(self, text: str) -> list[str]:
        """Return the cells of a row that begins with the line `text`."""
        if '"' not in text:
            return text.removesuffix("\n").removesuffix("\r").split("\t")
        cells: list[str] = []
        start = 0
        while True:
            end = 0
            if text.startswith('"', start):
                text, end = self._closed(text, start)
            if end:
                cells.append(text[start + 1 : end - 1].replace('""', '"'))
                self.quoted += 1
            else:
                cell_end = _CELL_ENDS.search(text, start)
                assert cell_end is not None  # the pattern matches at the end of every text
                end = cell_end.start()
                cells.append(text[start:end])
                self.with_quotes += '"' in cells[-1]
            if not text.startswith("\t", end):
                return cells
            start = end + 1

    def _closed(self, text: str, start: int) -> tuple[str, int]:
        """Return the text with the lines of the quoted cell at `start`, and the cell's end offset.

        The offset is 0 if the cell is not quoted."""
        line, offset, size = text, start + 1, 0
        further_lines: list[str] = []
        while (quote := _TO_QUOTE.match(line, offset)) is None:
            line, offset = self._line(len(further_lines)), 0
            size += len(line)
            if not line or size > _MAX_AHEAD:
                return text, 0
            further_lines.append(line)
        if not _CELL_ENDS.match(line, quote.end()):
            return text, 0
        lines = [text[text.rfind("\n", 0, start) + 1 :], *further_lines]
        if further_lines and all(row_line.count("\t") + 1 == self._columns for row_line in lines):
            last = self._number + len(further_lines)
            raise _RowError(
                self._number,
                f"a quote opens here and closes on line {last}, and each of these lines is a row, "
                "too. Quote every cell, the header's, too, or save the rows as JSON lines; if "
                "nothing is quoted, `scorekit score` reads it with --format tsv-unquoted",
            )
        self._take(len(further_lines))
        text += "".join(further_lines)
        return text, len(text) - len(line) + quote.end()


def _parquet_rows(
    file: BinaryIO, columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("to read Parquet, install pyarrow: pip install pyarrow") from None
    number = num_rows = 0
    try:
        table = ParquetFile(file)
        column_names = (
            None if columns is None else [c for c in table.schema_arrow.names if c in columns]
        )
        for batch in table.iter_batches(batch_size=1024, columns=column_names):
            for number, fields in enumerate(batch.to_pylist(), num_rows + 1):
                yield number, fields
            num_rows = number
    except ArrowException as error:
        raise _RowError(number, f"not Parquet: {error}") from None


def _lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(file, 1):
        try:
            text = raw.removeprefix(_BOM).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise _RowError(number, _NOT_UTF8) from None
        if text.strip(" \t"):
            yield number, text


def _column_error(cells: list[str], column: str) -> str:
    if count := cells.count(column):
        return f"the header has {count} columns {column!r}. Rename all but one of them"
    names = [repr(cell[:_MAX_SHOWN]) for cell in cells[:_MAX_SHOWN]]
    name_list = ", ".join(names) + (", ..." if len(cells) > len(names) else "")
    hint = "Name it there, or separate the columns by a comma (CSV) or a tab (TSV)"
    return f"the header has no column {column!r}, but {name_list}. {hint}"


def _header(
    number: int, cells: list[str], once: Sequence[str], columns: Sequence[str] | None
) -> list[str]:
    duplicates = (
        [name for name in cells if name and cells.count(name) > 1] if columns is None else []
    )
    for column in (*once, *duplicates):
        if cells.count(column) != 1:
            raise _RowError(number, _column_error(cells, column))
    return cells
