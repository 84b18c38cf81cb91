"""A SQLite file of scores. A damaged file is renamed and replaced: scores can be recomputed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from scorekit.files import identity_of

T = TypeVar("T")

_LOOKUP = 500  # keys per SELECT; SQLite allows at least 999 variables
#: Largest bytes of the write-ahead log after a checkpoint.
_LOG_BYTES = 16 * 2**20


class ScoreDatabase:
    """Values by key in a SQLite file, for one thread at a time.

    A damaged file is renamed as soon as the damage shows, and the next call creates a new file.
    If another process deleted or replaced the file, the next call opens the current one.

    busy_s: max seconds to wait for a lock of another process.
    on_damage: gets the damaged file's new name.
    max_bytes: above it each `set` deletes twice as many of the oldest values as it adds.

    All methods raise sqlite3.Error and OSError.
    """

    def __init__(
        self,
        path: Path,
        busy_s: float,
        on_damage: Callable[[Path], None],
        max_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._busy_s = busy_s
        self._on_damage = on_damage
        self._max_bytes = max_bytes
        self._db: sqlite3.Connection | None = None
        self._id: tuple[int, int] | None = None

    def open(self) -> sqlite3.Connection:
        """Return the connection, opened if necessary."""
        if self._db is not None and self._id != identity_of(self._path):
            self.close()
        if self._db is None:
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as error:
                if not (_is_damage(error) and _is_cache(self._path)):
                    raise
                self._on_damage(_move_aside(self._path))
                self._db = self._connect()
            self._id = identity_of(self._path)
        return self._db

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that have one."""
        return self._run(lambda db: _select(db, keys))

    def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all values in one transaction."""
        self._run(lambda db: _insert(db, values, self._max_bytes))

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`. After damage, the next call works on a new file."""
        db = self.open()
        try:
            return work(db)
        except sqlite3.DatabaseError as error:
            if _is_damage(error) and self._id == identity_of(self._path):
                # Moved first, then closed: SQLite deletes no log of a file that has moved.
                self._on_damage(_move_aside(self._path))
                self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, timeout=self._busy_s, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
            db.execute(
                "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value BLOB NOT NULL)"
            )
            _read_ends(db)
        except sqlite3.Error:
            db.close()
            raise
        return db


def _select(db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, bytes]:
    value_by_key: dict[bytes, bytes] = {}
    for start in range(0, len(keys), _LOOKUP):
        part = keys[start : start + _LOOKUP]
        marks = ",".join("?" * len(part))
        value_by_key.update(
            db.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", part)
        )
    return value_by_key


def _insert(db: sqlite3.Connection, values: Mapping[bytes, bytes], max_bytes: int | None) -> None:
    with db:
        db.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", values.items())
        if max_bytes is not None and _used_bytes(db) > max_bytes:
            # Delete a few rows per write: many at once would lock a large file for seconds.
            db.execute(
                "DELETE FROM scores WHERE rowid IN "
                "(SELECT rowid FROM scores ORDER BY rowid LIMIT ?)",
                (2 * len(values),),
            )


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


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


def _move_aside(path: Path) -> Path:
    """Rename the file, delete SQLite's logs for it, and return the new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # the old file's logs would damage the new file
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
