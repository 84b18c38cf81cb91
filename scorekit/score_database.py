"""A SQLite file of scores. A damaged file is renamed and replaced: scores can be recomputed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ScoreDatabase:
    """A connection to a SQLite file of scores, for one thread at a time.

    A damaged file is renamed as soon as the damage shows, and the next call creates a new file.
    If another process deleted or replaced the file, the next call opens the current one.

    connect: opens the file and creates its table `scores`. on_damage: gets the damaged file's new
    name.
    """

    def __init__(
        self,
        path: Path,
        connect: Callable[[Path], sqlite3.Connection],
        on_damage: Callable[[Path], None],
    ) -> None:
        self._path = path
        self._connect = connect
        self._on_damage = on_damage
        self._db: sqlite3.Connection | None = None
        self._id: tuple[int, int] | None = None

    def open(self) -> sqlite3.Connection:
        """Return the connection, opened if necessary. Raises sqlite3.Error, OSError."""
        if self._db is not None and self._id != _file_id(self._path):
            self.close()
        if self._db is None:
            try:
                self._db = self._connected()
            except sqlite3.DatabaseError as error:
                if not (_is_damage(error) and _is_cache(self._path)):
                    raise
                self._on_damage(_move_aside(self._path))
                self._db = self._connected()
            self._id = _file_id(self._path)
        return self._db

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work` with the connection.

        Raises sqlite3.Error, OSError. After damage, the next call works on a new file."""
        db = self.open()
        try:
            return work(db)
        except sqlite3.DatabaseError as error:
            if _is_damage(error) and self._id == _file_id(self._path):
                # Moved first, then closed: SQLite deletes no log of a file that has moved.
                self._on_damage(_move_aside(self._path))
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
    """Read both ends of the table `scores`, so that most damage fails now and not later."""
    for order in ("key ASC", "rowid ASC", "rowid DESC"):
        db.execute(f"SELECT key, value FROM scores ORDER BY {order} LIMIT 1").fetchall()


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def _is_cache(path: Path) -> bool:
    """Return True if an unreadable file was a SQLite file, by its first bytes or its name.

    Any other file of the user is left alone."""
    with path.open("rb") as file:
        has_sqlite_header = file.read(16) == b"SQLite format 3\0"
    return has_sqlite_header or path.suffix in (".sqlite", ".sqlite3", ".db")


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file, or None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _move_aside(path: Path) -> Path:
    """Rename the file, delete SQLite's logs for it, and return the new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # the old file's logs would damage the new file
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
