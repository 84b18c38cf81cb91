"""A SQLite file of scores that is damaged: scores can be computed anew, so it is put aside."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path


def read_ends(db: sqlite3.Connection) -> None:
    """Read both ends of the table `scores`: a damaged file fails here, mostly, and not later.
    Raises sqlite3.DatabaseError."""
    for order in ("key ASC", "rowid ASC", "rowid DESC"):
        db.execute(f"SELECT key, value FROM scores ORDER BY {order} LIMIT 1").fetchall()


def is_damaged_cache(path: Path, error: sqlite3.Error) -> bool:
    """Whether a file that SQLite cannot read was one of its own, by its first bytes or its name:
    somebody's notes are left where they are."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    with path.open("rb") as file:
        began_well = file.read(16) == b"SQLite format 3\0"
    named_so = path.suffix in (".sqlite", ".sqlite3", ".db")
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) and (began_well or named_so)


def move_aside(path: Path) -> Path:
    """Give the file another name, which is returned; what SQLite keeps beside it goes."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # of the old file: they would damage the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
