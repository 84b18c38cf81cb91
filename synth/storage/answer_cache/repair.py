"""Repair a damaged SQLite file of answers by copying its readable rows into a new file."""

from __future__ import annotations

import os
import sqlite3
from itertools import islice
from pathlib import Path

from synth.storage.answer_cache.base import unpack
from synth.storage.answer_cache.salvage import rows
from synth.storage.answer_cache.sqlite_file import lock_of, opened, sibling_files
from synth.storage.locks import hold_locks


def repair_database(path: Path) -> tuple[int, int | None]:
    """Copy the readable rows of a damaged file into a new one, which replaces it.

    The old file stays as NAME.damaged.

    Returns (number of answers, number of unreadable rows; None if the file is intact and was not
    changed). Rows whose position is unknown are not counted. Raises UserError while another process
    has the file open.
    """
    with hold_locks([(lock_of(path), False)], "repair it"):
        if _is_intact(path):
            db = opened(path)
            num_answers = int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
            db.close()
            return num_answers, None
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
    try:
        db = opened(path)
        try:
            if db.execute("PRAGMA integrity_check").fetchall() != [(b"ok",)]:
                return False
            stored = db.execute("SELECT key, value FROM answers")
            return all(unpack(*row) is not None for row in stored)
        finally:
            db.close()
    except sqlite3.Error:
        return False


def _salvage(path: Path, fresh: Path) -> tuple[int, int]:
    """Return (rows written to the new file, unreadable rows of the old file)."""
    new = opened(fresh)
    num_unreadable = 0
    candidates = rows(path)
    while batch := list(islice(candidates, 1000)):
        good = [row for row in batch if row is not None and unpack(*row) is not None]
        num_unreadable += len(batch) - len(good)
        new.execute("BEGIN")
        new.executemany("INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)", good)
        new.execute("COMMIT")
    num_answers = int(new.execute("SELECT count(*) FROM answers").fetchone()[0])
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    return num_answers, num_unreadable
