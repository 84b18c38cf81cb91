"""A damaged SQLite file of answers: what can be read of it goes into a new one."""

from __future__ import annotations

import os
import sqlite3
from itertools import islice
from pathlib import Path

from synth.folder.answers.contract import unpack
from synth.folder.answers.salvage import rows
from synth.folder.answers.sqlite_file import beside, lock_of, opened
from synth.folder.locks import held


def mend(path: Path) -> tuple[int, int | None]:
    """Copy what can be read of a damaged file into a new one, which takes its name; the old one
    stays beside it as NAME.damaged.

    (answers kept, rows that cannot be read: None where nothing is wrong and nothing was done; rows
    of which not even the place is known are in no count). Raises UserError while another process
    has the file open.
    """
    with held([(lock_of(path), False)], "mend it"):
        if _is_whole(path):
            db = opened(path)
            kept = int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
            db.close()
            return kept, None
        fresh = path.with_name(path.name + ".mended")
        for leftover in (fresh, *beside(fresh)):
            leftover.unlink(missing_ok=True)
        kept, lost = _salvage(path, fresh)
        old = path.with_name(path.name + ".damaged")
        for leftover in (old, *beside(old)):
            leftover.unlink(missing_ok=True)
        os.link(path, old)  # at every moment there is a file of that name
        for log_file, name in zip(beside(path), beside(old), strict=True):
            if log_file.exists():
                log_file.rename(name)
        os.replace(fresh, path)
        return kept, lost


def _is_whole(path: Path) -> bool:
    """Whether SQLite and the checksums of all values find nothing wrong."""
    log_file = beside(path)[0]
    if log_file.exists() and log_file.stat().st_size:
        return False  # it may be damaged, too, and SQLite would pass over its end in silence
    try:
        db = opened(path)
        try:
            if db.execute("PRAGMA integrity_check").fetchall() != [(b"ok",)]:
                return False
            found = db.execute("SELECT key, value FROM answers")
            return all(unpack(*row) is not None for row in found)
        finally:
            db.close()
    except sqlite3.Error:
        return False


def _salvage(path: Path, fresh: Path) -> tuple[int, int]:
    """(rows written to a new file, rows of the old one that cannot be read)."""
    new = opened(fresh)
    lost = 0
    found = rows(path)
    while some := list(islice(found, 1000)):
        good = [row for row in some if row is not None and unpack(*row) is not None]
        lost += len(some) - len(good)
        new.execute("BEGIN")
        new.executemany("INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)", good)
        new.execute("COMMIT")
    kept = int(new.execute("SELECT count(*) FROM answers").fetchone()[0])
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    return kept, lost
