"""A SQLite file of scores that is damaged: scores can be computed anew, so it is put aside."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ScoreFile:
    """One connection to a SQLite file of scores; one thread uses it at a time.

    A file that turns out to be damaged is put aside, at once or in mid-run; one that somebody
    deleted or replaced is let go. The next call begins a new one, or takes what is there.

    connect: opens the file and makes its table `scores`. told: gets the damaged file's new name.
    """

    def __init__(
        self,
        path: Path,
        connect: Callable[[Path], sqlite3.Connection],
        told: Callable[[Path], None],
    ) -> None:
        self._path = path
        self._connect = connect
        self._told = told
        self._db: sqlite3.Connection | None = None
        self._id: tuple[int, int] | None = None

    def open(self) -> sqlite3.Connection:
        """The connection. Raises sqlite3.Error, OSError."""
        if self._db is not None and self._id != _file_id(self._path):
            self.close()
        if self._db is None:
            try:
                self._db = self._connected()
            except sqlite3.DatabaseError as error:
                if not (_is_damage(error) and _is_cache(self._path)):
                    raise
                self._told(_move_aside(self._path))
                self._db = self._connected()
            self._id = _file_id(self._path)
        return self._db

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` makes of the connection. Raises sqlite3.Error, OSError, also for the damage
        that the next call no longer meets."""
        db = self.open()
        try:
            return work(db)
        except sqlite3.DatabaseError as error:
            if _is_damage(error) and self._id == _file_id(self._path):
                # Moved first, then closed: SQLite deletes no log of a file that has moved.
                self._told(_move_aside(self._path))
                self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connected(self) -> sqlite3.Connection:
        db = self._connect(self._path)
        try:
            _read_ends(db)
        except sqlite3.Error:
            db.close()
            raise
        return db


def _read_ends(db: sqlite3.Connection) -> None:
    """Read both ends of the table `scores`: a damaged file fails here, mostly, and not later."""
    for order in ("key ASC", "rowid ASC", "rowid DESC"):
        db.execute(f"SELECT key, value FROM scores ORDER BY {order} LIMIT 1").fetchall()


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def _is_cache(path: Path) -> bool:
    """Whether a file that SQLite cannot read was one of its own, by its first bytes or its name:
    somebody's notes are left where they are."""
    with path.open("rb") as file:
        began_well = file.read(16) == b"SQLite format 3\0"
    return began_well or path.suffix in (".sqlite", ".sqlite3", ".db")


def _file_id(path: Path) -> tuple[int, int] | None:
    """Which file is there, whatever its name; None: none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _move_aside(path: Path) -> Path:
    """Give the file another name, which is returned; what SQLite keeps beside it goes."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # of the old file: they would damage the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
