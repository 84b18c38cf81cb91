"""Kept answers in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from scorekit.errors import UserError
from scorekit.files import identity_of
from synth.folder.answers.contract import pack, unpack
from synth.folder.answers.salvage import PAGE
from synth.folder.locks import try_lock

log = structlog.get_logger()

_LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least
_BUSY_S = 60.0  # while other processes write


class SqliteAnswers:
    """Answers in a SQLite file, which several processes of one machine may share.

    A write is with the kernel when it returns; a power cut may lose the last ones, and never
    leaves a broken file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # ":memory:" is a file, too
        self.damaged = 0
        self._lock = try_lock(lock_of(path), shared=True)
        if self._lock is None:
            raise UserError(f"run.answers {path}: is being mended; wait until that is done")
        try:
            self._db = opened(path)
            self._db.execute("BEGIN IMMEDIATE")  # a file that may not be written says so now,
            self._db.execute("ROLLBACK")  # and not when an answer was paid for
            self._file = identity_of(path)
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            raise UserError(f"run.answers {path}: {error}; {_MEND}") from None

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one."""
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _LOOKUP):
            some = [bytes.fromhex(key) for key in keys[start : start + _LOOKUP]]
            for key, value in self._rows(some):
                answer = unpack(key, value)
                if answer is None:
                    self._note_damage(key.hex())
                else:
                    found[key.hex()] = answer[0]
        return found

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. Raises UserError for a full disk
        and for a file that is too damaged to be written."""
        rows = [pack(key, answer) for key, answer in answers.items()]
        if identity_of(self.path) != self._file:
            raise UserError(
                f"run.answers {self.path}: was deleted or replaced while a run was at work: what "
                "is written now would be lost; put it back, or --resume with a new one"
            )
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT INTO answers (key, value) VALUES (?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                rows,
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise UserError(f"run.answers {self.path}: {error}; {_MEND}") from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    async def close(self) -> None:
        """Close the file."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def _rows(self, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
        marks = ",".join("?" * len(keys))
        query = f"SELECT key, value FROM answers WHERE key IN ({marks})"
        try:
            return self._db.execute(query, keys).fetchall()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or the disk: not the file
                raise UserError(f"run.answers {self.path}: {error}; {_MEND}") from None
        if len(keys) > 1:  # a damaged page hides its own rows only
            return [row for key in keys for row in self._rows([key])]
        self._note_damage(keys[0].hex())
        return []

    def _note_damage(self, key: str) -> None:
        self.damaged += 1
        log.warning("answer_damaged", file=str(self.path), key=key)


#: What to do about a file that does not take an answer.
_MEND = (
    "make room, name another, or mend it with "
    "`python -m synth repair --config FILE`, which keeps what can be read"
)


def opened(path: Path) -> sqlite3.Connection:
    """The file, made where there is none. Raises sqlite3.Error."""
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may look like a text, and be none
    db.execute(f"PRAGMA page_size={PAGE}")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    # Rows by number, and the keys in an index beside them: a damaged index hides no row, and a
    # damaged page of rows hides its own only. `salvage` knows this layout.
    db.execute(
        "CREATE TABLE IF NOT EXISTS answers "
        "(id INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)"
    )
    db.execute("CREATE UNIQUE INDEX IF NOT EXISTS by_key ON answers (key)")
    return db


def lock_of(path: Path) -> Path:
    """Its lock: shared by those who use it, alone to mend it."""
    return path.with_name(path.name + ".lock")


def beside(path: Path) -> list[Path]:
    """SQLite's own files of a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]
