"""Repair a damaged SQLite file of paid answers by copying its readable rows into a new file.

A file of the version before is repaired, too, whose answers have no numbers.
"""

from __future__ import annotations

import glob
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from scorekit.errors import UserError
from scorekit.locks import hold_locks, is_locked
from scorekit.paid.answers import NO_ANSWER, unpack
from scorekit.paid.sqlite import PAGE, lock_of, open_database, sibling_files

#: First byte of a page with rows of a table.
_TABLE_LEAF = b"\x0d"
#: Sizes of the headers of a log and of a page in it.
_LOG_HEADER, _FRAME_HEADER = 32, 24
#: A table of which every row of a file can be read: values that a row lacks are null.
_ANY_ROW = "CREATE TABLE any_row (a, b, c, d, e, f)"
#: A readable row: the statement that stores it, and its values.
_Row: TypeAlias = tuple[str, tuple[Any, ...]]
_INSERTS = {
    "answer": "INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)",
    "charge": "INSERT OR IGNORE INTO charges VALUES (?, ?, ?, ?, ?, ?)",
    "judge": "INSERT OR IGNORE INTO judges VALUES (?, ?)",
}


def repair_database(path: Path) -> tuple[int, int | None]:
    """Copy the readable rows of a damaged file into a new one, which replaces it.

    The old file stays as NAME.damaged.

    Answers, charges and judges are kept; the calls in flight are not. Returns (number of answers,
    number of unreadable rows; None if the file is intact and was not changed). Rows whose position
    is unknown are not counted. Raises UserError while another process has the file open.
    """
    with hold_locks([(lock_of(path), False)], "repair it"):
        if any(is_locked(lock) for lock in path.parent.glob(f"{glob.escape(path.name)}.*.lock")):
            raise UserError(f"{path}: a process of a run has it open, so it cannot be repaired")
        if _is_intact(path):
            with closing(open_database(path)) as db:
                return _count(db), None
        fresh = path.with_name(path.name + ".mended")
        for leftover in (fresh, *sibling_files(fresh)):
            leftover.unlink(missing_ok=True)
        num_answers, num_unreadable = _salvage(path, fresh)
        old = path.with_name(path.name + ".damaged")
        for leftover in (old, *sibling_files(old)):
            leftover.unlink(missing_ok=True)
        os.link(path, old)  # a file of that name exists at every moment
        for log_file, name in zip(sibling_files(path), sibling_files(old), strict=True):
            if log_file.exists():
                log_file.rename(name)
        os.replace(fresh, path)
        return num_answers, num_unreadable


def repaired_lines(path: Path) -> list[str]:
    """Repair a file, and return what became of it as lines for people. Raises UserError."""
    num_answers, num_unreadable = repair_database(path)
    line = f"{path}: {num_answers} answers kept"
    if num_unreadable is not None:
        line += (
            f"; {num_unreadable} rows, and rows on destroyed pages, cannot be read and will be "
            f"requested again (the old file is {path}.damaged)"
        )
    return [line]


def _is_intact(path: Path) -> bool:
    """Return True if SQLite and the checksums of all values find no damage."""
    log_file = sibling_files(path)[0]
    if log_file.exists() and log_file.stat().st_size:
        return False  # it may be damaged, and SQLite would silently ignore its end
    with suppress(sqlite3.Error), closing(open_database(path)) as db:
        if db.execute("PRAGMA integrity_check").fetchall() == [(b"ok",)]:
            stored = db.execute("SELECT key, value FROM answers")
            return all(unpack(*row) is not NO_ANSWER for row in stored)
    return False


def _count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])


def _salvage(path: Path, fresh: Path) -> tuple[int, int]:
    """Return (rows written to the new file, unreadable rows of the old file)."""
    new = open_database(fresh)
    scratch = path.with_name(path.name + ".scratch")
    num_unreadable = 0
    try:
        for num_rows, page_rows in _pages(path, scratch):
            readable = [row for row in map(_kind, page_rows) if row is not None]
            num_unreadable += max(0, num_rows - len(readable))
            new.execute("BEGIN")
            for statement, values in readable:
                if statement:
                    new.execute(statement, values)
            new.execute("COMMIT")
    finally:
        scratch.unlink(missing_ok=True)
    num_answers = _count(new)
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    return num_answers, num_unreadable


def _kind(row: tuple[Any, ...]) -> _Row | None:
    """Return how a row is stored in the new file; None for an unreadable one.

    An answer has a checksum. Of the others, the types of the values tell.
    """
    number, a, b, c, d, e, f = row
    for key, value in ((b, c), (a, b)):  # the second: of a file of the version before
        are_bytes = isinstance(key, bytes) and isinstance(value, bytes)
        if are_bytes and unpack(key, value) is not NO_ANSWER:
            return _INSERTS["answer"], (key, value)
    with suppress(UnicodeDecodeError):
        if a is None and all(isinstance(count, int) and count >= 0 for count in (d, e, f)):
            return _INSERTS["charge"], (number, b.decode(), c.decode(), d, e, f)
        if isinstance(a, bytes) and isinstance(b, bytes) and (c, d, e, f) == (None,) * 4:
            is_judge = len(a) != 16 and b"@" in b
            return (_INSERTS["judge"], (a.decode(), b.decode())) if is_judge else None
        if isinstance(a, bytes) and all(isinstance(count, int) for count in (e, f)):
            return "", ()  # a claim
    if isinstance(a, bytes) and (b, c, d, e, f) == (None,) * 5:
        return "", ()  # the name of a file that was taken over
    return None


def _pages(path: Path, scratch: Path) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Yield, for each page with rows, their number and the rows that SQLite can read.

    SQLite follows pointers between pages, so one bad page hides others, and a truncated file cannot
    be opened at all. So each page takes the place of the table's root in turn, in a copy of the
    file that begins like an empty one. Then SQLite reads the rows of this page only.
    """
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.execute(f"PRAGMA page_size={PAGE}")
        empty.execute(_ANY_ROW)
        first_page = bytearray(empty.serialize()[:PAGE])
        query = "SELECT rootpage FROM sqlite_master"
        root = int(empty.execute(query).fetchone()[0])
    first_page[28:32] = bytes(4)  # the number of pages: as many as the file has
    shutil.copyfile(path, scratch)
    with scratch.open("r+b", buffering=0) as file:
        _apply_log(sibling_files(path)[0], file)
        num_pages = -(-file.seek(0, os.SEEK_END) // PAGE)
        file.truncate(num_pages * PAGE)
        root_page = _read_page(file, root)
        _write_page(file, 1, first_page)
        for number in range(2, num_pages + 1):
            page = root_page if number == root else _read_page(file, number)
            if page[:1] == _TABLE_LEAF:
                _write_page(file, root, page)
                yield int.from_bytes(page[3:5], "big"), _rows(scratch)


def _read_page(file: BinaryIO, number: int) -> bytes:
    file.seek((number - 1) * PAGE)
    return file.read(PAGE)


def _write_page(file: BinaryIO, number: int, page: bytes | bytearray) -> None:
    file.seek((number - 1) * PAGE)
    file.write(page)


def _apply_log(log: Path, file: BinaryIO) -> None:
    """Write the pages of a log into its file; SQLite would ignore those after a damaged one.

    The layout is described in https://www.sqlite.org/fileformat2.html, section 4."""
    content = log.read_bytes() if log.exists() else b""
    max_number = (file.seek(0, os.SEEK_END) + len(content)) // PAGE + 1
    for start in range(_LOG_HEADER, len(content) - _FRAME_HEADER - PAGE + 1, _FRAME_HEADER + PAGE):
        number = int.from_bytes(content[start : start + 4], "big")
        is_current = content[start + 8 : start + 16] == content[16:24]  # else of an earlier log
        if is_current and 0 < number <= max_number:
            page_start = start + _FRAME_HEADER
            _write_page(file, number, content[page_start : page_start + PAGE])


def _rows(path: Path) -> list[tuple[Any, ...]]:
    """Return the rows up to the first that SQLite cannot read."""
    rows: list[tuple[Any, ...]] = []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
        db.text_factory = bytes
        with suppress(sqlite3.DatabaseError):
            rows.extend(db.execute("SELECT rowid, * FROM any_row"))
    return rows
