"""Reads a TSV whose cells may be quoted.

- The first line names the columns. Cells have tabs between them, rows end with LF or CRLF.
- A cell is quoted if it begins with a quote and the next quote that is not doubled is at its end.
  The quotes are removed, "" is one quote, and the cell may contain tabs and line ends. csv.writer
  and pandas write this form.
- Every other cell is unchanged text: `"Hi," he said`, a single quote, one that is never closed.

A quoted cell that spans lines is ambiguous if each of the lines is a complete row: that is an
error, unless the cells of the header are quoted. `tsv-unquoted` reads every quote as text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import BinaryIO

BOM = b"\xef\xbb\xbf"
NOT_UTF8 = "not UTF-8 text. Save the file as UTF-8, or name its encoding"
#: Longest line of JSON or of a TSV, in bytes: a small gzip can hold one of many gigabytes.
MAX_LINE_BYTES = 2**28
#: Largest distance, in characters, to the end of a quoted cell that spans lines of a TSV.
_MAX_AHEAD = 2**24
#: Up to the next quote that is not doubled.
_TO_QUOTE = re.compile(r'(?:[^"]++|"")*+"')
_CELL_ENDS = re.compile(r"\t|\r?\n|\r?\Z")


class RowError(ValueError):
    """The file cannot be read on from line `number`; 0: from any.

    names: those of a header that lacks a column."""

    def __init__(self, number: int, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.number, self.names = number, names


def read_line(file: BinaryIO, number: int) -> bytes:
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise RowError(number, f"longer than {MAX_LINE_BYTES:,} bytes. Is a line end missing?")
    return line


class Tsv:
    """A TSV whose cells may be quoted: the top of this file has the rules.

    quoted: number of cells that were unquoted so far.
    with_quotes: number of others that contain a quote.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.quoted = self.with_quotes = 0
        self._file = file
        self._ahead: deque[str] = deque()  # lines that were read but not consumed
        self._number = 0  # number of the line consumed last
        self._columns: int | None = None  # columns of a row, if multi-line cells may be a mistake
        self._damaged: deque[int] = deque()  # lines ahead that are not UTF-8

    def records(self) -> Iterator[tuple[int, list[str], str]]:
        """Yield (number of the first line, cells, problem) of the header and of each row."""
        is_header = True
        while line := self._line(0):
            self._take(1)
            number = self._number
            cells = self._cells(line)
            if len(cells) > 1 or cells[0].strip():
                if is_header and self.quoted < len(cells):
                    self._columns = len(cells)
                is_header = False
            damaged = []
            while self._damaged and self._damaged[0] <= self._number:
                damaged.append(self._damaged.popleft())
            yield damaged[0] if damaged else number, cells, NOT_UTF8 if damaged else ""

    def _line(self, ahead: int) -> str:
        """Return a line with its end, `ahead` lines after the next one; empty after the last."""
        while len(self._ahead) <= ahead:
            number = self._number + len(self._ahead) + 1
            raw = read_line(self._file, number).removeprefix(BOM if number == 1 else b"")
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                self._damaged.append(number)
                text = raw.decode(errors="surrogateescape")
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
                text, end = self._read_quoted(text, start)
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

    def _read_quoted(self, text: str, start: int) -> tuple[str, int]:
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
            raise RowError(
                self._number,
                f"a quote opens here and closes on line {last}, and each of these lines is a row, "
                "too. Quote every cell, the header's, too, or save the rows as JSON lines; if "
                "nothing is quoted, `scorekit score` reads it with --format tsv-unquoted",
            )
        self._take(len(further_lines))
        text += "".join(further_lines)
        return text, len(text) - len(line) + quote.end()
