"""Rows of a file, one by one: JSON lines, TSV, CSV or Parquet, plain or gzipped, or from stdin.

How a TSV is read, here and by the page of a service (scorekit/server/page/rows.js):

- The first line names the columns. Cells have tabs between them, rows end with LF or CRLF.
- A cell is quoted if it begins with a quote and the next quote that is not doubled stands at its
  end. The quotes come off, "" is one quote, and the cell may hold tabs and line ends. So csv.writer
  and pandas write.
- Every other cell is text as it stands: `"Hi," he said`, a quote alone, one that nothing closes.
- A line without a tab and without a text is skipped.

Two readings are possible where a quoted cell runs over lines of which each is a whole row: that is
an error, unless the cells of the header are quoted. `tsv-unquoted` takes every quote as text.
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
_MOST_SHOWN = 20  # columns of a header in a message, and letters of each
_NOT_UTF8 = "not UTF-8 text. Save the file as UTF-8"
_GZIP = b"\x1f\x8b"
#: Longest cell of a CSV; the csv module's own limit is 131,072 characters.
MOST_CHARACTERS = 2**30
#: So many characters behind a line of a TSV may a quote close that the line opens.
_MOST_AHEAD = 2**24
#: To the next quote that is not doubled.
_TO_QUOTE = re.compile(r'(?:[^"]++|"")*+"')
_CELL_ENDS = re.compile(r"\t|\r?\n|\r?\Z")

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """number: of the line it begins on, of a Parquet file the row's; from 1."""

    number: int
    fields: dict[str, Any]


class RowFile:
    """A file with a row a line: JSON objects; a TSV or a CSV with a header; or Parquet. Blank lines
    are skipped. gzip is known by its first bytes. `-` is stdin, which is kept in a temporary file,
    so that it can be read again.
    """

    def __init__(
        self, path: Path, format: Format | None = None, *, remedy: str = "rename it"
    ) -> None:
        """format: default by the file's ending, of stdin JSON lines. Raises UserError, with what
        can be done about it, where the ending says nothing."""
        self._spool: BinaryIO | None = None
        self._warned = False
        self.is_stdin = str(path) == "-"
        self.path = Path("stdin") if self.is_stdin else path
        endings = [ending.lower().lstrip(".") for ending in path.suffixes[-2:]]
        if endings and endings[-1] == "gz":
            endings.pop()
        found = "jsonl" if self.is_stdin else endings[-1] if endings else ""
        if format is None and found not in get_args(Ending):
            known = ", ".join(f".{name}" for name in get_args(Ending))
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
        number = 0
        try:
            with self._open() as file:
                rows = self._read(file, once, columns)
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
        """Say once that the quotes of some cells came off and those of others did not: a program
        that quotes cells quotes all that hold a quote."""
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


def _json_rows(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in _lines(file):
        try:
            found = from_json(text)
        except ValueError as error:
            what = str(error).replace("at line 1 column", "at column")
            raise _Fault(number, f"not JSON: {what}") from None
        if not isinstance(found, dict):
            raise _Fault(number, "not a JSON object")
        yield number, found


def _rows_below(
    records: Iterator[tuple[int, list[str]]], once: Sequence[str], columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows below the first, which is the header."""
    header: list[str] | None = None
    for number, cells in records:
        if header is None:
            header = _header(number, cells, once, columns)
        elif len(cells) != len(header):
            raise _Fault(number, f"{len(cells)} columns, the header has {len(header)}")
        else:
            yield number, dict(zip(header, cells, strict=True))


def _unquoted_records(file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    for number, text in _lines(file):
        yield number, text.split("\t")


def _csv_records(file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MOST_CHARACTERS)
    # The decoder reads ahead: a byte that is not UTF-8 is found in its row.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise _Fault(number, str(error)) from None
        if cells is not None and any(map(_ESCAPED.search, cells)):
            raise _Fault(number, _NOT_UTF8)
        if cells is None:
            return
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield number, cells


class _Tsv:
    """A TSV whose cells may be quoted: the top of this file says when.

    quoted: cells whose quotes came off, so far. with_quotes: others that hold a quote.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.quoted = self.with_quotes = 0
        self._file = file
        self._ahead: deque[str] = deque()  # lines that are read and not taken
        self._number = 0  # of the line taken last
        self._columns: int | None = None  # of a row, where a cell over several may be a mistake

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """(number of its first line, cells) of the header and of each row."""
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
        """A line with its end, `ahead` lines behind the next; empty behind the last."""
        while len(self._ahead) <= ahead:
            raw = self._file.readline()
            number = self._number + len(self._ahead) + 1
            try:
                text = raw.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError:
                raise _Fault(number, _NOT_UTF8) from None
            self._ahead.append(text)
        return self._ahead[ahead]

    def _take(self, lines: int) -> None:
        for _ in range(lines):
            self._ahead.popleft()
        self._number += lines

    def _cells(self, text: str) -> list[str]:
        """The cells of a row that begins with the line `text`."""
        if '"' not in text:
            return text.removesuffix("\n").removesuffix("\r").split("\t")
        cells: list[str] = []
        at = 0
        while True:
            end = 0
            if text.startswith('"', at):
                text, end = self._closed(text, at)
            if end:
                cells.append(text[at + 1 : end - 1].replace('""', '"'))
                self.quoted += 1
            else:
                found = _CELL_ENDS.search(text, at)
                assert found is not None  # every text ends
                end = found.start()
                cells.append(text[at:end])
                self.with_quotes += '"' in cells[-1]
            if not text.startswith("\t", end):
                return cells
            at = end + 1

    def _closed(self, text: str, at: int) -> tuple[str, int]:
        """The text, with the lines that the quoted cell at `at` runs over, and the place behind
        that cell; 0 where it is not quoted."""
        part, look, size = text, at + 1, 0
        more: list[str] = []
        while (quote := _TO_QUOTE.match(part, look)) is None:
            part, look = self._line(len(more)), 0
            size += len(part)
            if not part or size > _MOST_AHEAD:
                return text, 0
            more.append(part)
        if not _CELL_ENDS.match(part, quote.end()):
            return text, 0
        lines = [text[text.rfind("\n", 0, at) + 1 :], *more]
        if more and all(line.count("\t") + 1 == self._columns for line in lines):
            last = self._number + len(more)
            raise _Fault(
                self._number,
                f"a quote opens here and closes on line {last}, and each of these lines is a row, "
                "too. Quote every cell, the header's, too, or save the rows as JSON lines; if "
                "nothing is quoted, `scorekit score` reads it with --format tsv-unquoted",
            )
        self._take(len(more))
        text += "".join(more)
        return text, len(text) - len(part) + quote.end()


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
        except UnicodeDecodeError:
            raise _Fault(number, _NOT_UTF8) from None
        if text.strip(" \t"):
            yield number, text


def _column_fault(cells: list[str], column: str) -> str:
    if count := cells.count(column):
        return f"the header has {count} columns {column!r}. Rename all but one of them"
    shown = [repr(cell[:_MOST_SHOWN]) for cell in cells[:_MOST_SHOWN]]
    there = ", ".join(shown) + (", ..." if len(cells) > len(shown) else "")
    how = "Name it there, or separate the columns by a comma (CSV) or a tab (TSV)"
    return f"the header has no column {column!r}, but {there}. {how}"


def _header(
    number: int, cells: list[str], once: Sequence[str], columns: Sequence[str] | None
) -> list[str]:
    twice = [name for name in cells if name and cells.count(name) > 1] if columns is None else []
    for column in (*once, *twice):
        if cells.count(column) != 1:
            raise _Fault(number, _column_fault(cells, column))
    return cells
