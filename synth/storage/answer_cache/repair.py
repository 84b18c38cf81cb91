"""Repair a damaged SQLite file of answers by copying its readable rows into a new file."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from synth.storage.answer_cache.base import unpack
from synth.storage.answer_cache.sqlite_file import PAGE, lock_of, opened, sibling_files
from synth.storage.locks import hold_locks

#: First byte of a page with rows of a table.
_TABLE_LEAF = b"\x0d"
#: Sizes of the headers of a log and of a page in it.
_LOG_HEADER, _FRAME_HEADER = 32, 24


def repair_database(path: Path) -> tuple[int, int | None]:
    """Copy the readable rows of a damaged file into a new one, which replaces it.

    The old file stays as NAME.damaged.

    Returns (number of answers, number of unreadable rows; None if the file is intact and was not
    changed). Rows whose position is unknown are not counted. Raises UserError while another process
    has the file open.
    """
    with hold_locks([(lock_of(path), False)], "repair it"):
        if _is_intact(path):
            with closing(opened(path)) as db:
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


def _is_intact(path: Path) -> bool:
    """Return True if SQLite and the checksums of all values find no damage."""
    log_file = sibling_files(path)[0]
    if log_file.exists() and log_file.stat().st_size:
        return False  # it may be damaged, and SQLite would silently ignore its end
    with suppress(sqlite3.Error), closing(opened(path)) as db:
        if db.execute("PRAGMA integrity_check").fetchall() == [(b"ok",)]:
            stored = db.execute("SELECT key, value FROM answers")
            return all(unpack(*row) is not None for row in stored)
    return False


def _count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])


def _salvage(path: Path, fresh: Path) -> tuple[int, int]:
    """Return (rows written to the new file, unreadable rows of the old file)."""
    new = opened(fresh)
    scratch = path.with_name(path.name + ".scratch")
    num_unreadable = 0
    try:
        for num_rows, page_rows in _pages(path, scratch):
            good = [row for row in page_rows if unpack(*row) is not None]
            num_unreadable += max(0, num_rows - len(good))
            new.execute("BEGIN")
            new.executemany("INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)", good)
            new.execute("COMMIT")
    finally:
        scratch.unlink(missing_ok=True)
    num_answers = _count(new)
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    return num_answers, num_unreadable


def _pages(path: Path, scratch: Path) -> Iterator[tuple[int, list[tuple[bytes, bytes]]]]:
    """Yield, for each page with rows, their number and the rows that SQLite can read.

    SQLite follows pointers between pages, so one bad page hides others, and a truncated file cannot
    be opened at all. So each page takes the place of the table's root in turn, in a copy of the
    file that begins like an empty one. Then SQLite reads the rows of this page only.
    """
    with closing(opened(Path(":memory:"))) as empty:
        first_page = bytearray(empty.serialize()[:PAGE])
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'answers'"
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


def _rows(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the rows up to the first that SQLite cannot read."""
    rows: list[tuple[bytes, bytes]] = []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
        db.text_factory = bytes
        with suppress(sqlite3.DatabaseError):
            rows.extend(db.execute("SELECT key, value FROM answers NOT INDEXED"))
    return rows
