"""An answer cache in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from scorekit.errors import UserError
from scorekit.files import identity_of
from synth.storage.answer_cache.base import pack, unpack
from synth.storage.locks import try_lock

log = structlog.get_logger()

#: Page size in bytes of our files (SQLite's default).
PAGE = 4096
_LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least
_BUSY_S = 60.0  # while other processes write


class SqliteAnswers:
    """Answers in a SQLite file, which several processes of one machine can share.

    A write has reached the kernel when it returns. A power cut may lose the last writes, but never
    breaks the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # ":memory:" is a file, too
        self.damaged = 0
        self._lock = try_lock(lock_of(path), shared=True)
        if self._lock is None:
            raise UserError(f"run.answers {path}: is being repaired. Wait until that is done")
        try:
            self._db = opened(path)
            self._db.execute("BEGIN IMMEDIATE")  # a read-only file must fail now,
            self._db.execute("ROLLBACK")  # and not after an answer was paid for
            self._file = identity_of(path)
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            raise UserError(f"run.answers {path}: {error}; {_REPAIR_HINT}") from None

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the answers of those keys that have one."""
        answers_by_key: dict[str, Any] = {}
        for start in range(0, len(keys), _LOOKUP):
            batch = [bytes.fromhex(key) for key in keys[start : start + _LOOKUP]]
            for key, value in self._rows(batch):
                answer = unpack(key, value)
                if answer is None:
                    self._note_damage(key.hex())
                else:
                    answers_by_key[key.hex()] = answer[0]
        return answers_by_key

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Store answers, all or none of them.

        Raises UserError for a full disk and for a file that is too damaged."""
        rows = [pack(key, answer) for key, answer in answers.items()]
        if identity_of(self.path) != self._file:
            raise UserError(
                f"run.answers {self.path}: was deleted or replaced during a run, so new answers "
                "would be lost. Put it back, or --resume with a new one"
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
            raise UserError(f"run.answers {self.path}: {error}; {_REPAIR_HINT}") from None
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
                raise UserError(f"run.answers {self.path}: {error}; {_REPAIR_HINT}") from None
        if len(keys) > 1:  # only the rows of a damaged page are lost
            return [row for key in keys for row in self._rows([key])]
        self._note_damage(keys[0].hex())
        return []

    def _note_damage(self, key: str) -> None:
        self.damaged += 1
        log.warning("answer_damaged", file=str(self.path), key=key)


#: Hint for a file that cannot be written.
_REPAIR_HINT = (
    "free disk space, name another file, or repair it with "
    "`scorekit synth repair --config FILE`, which keeps the readable answers"
)


def opened(path: Path) -> sqlite3.Connection:
    """Open the file; create it if it does not exist. Raises sqlite3.Error."""
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may not be valid text
    db.execute(f"PRAGMA page_size={PAGE}")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    # Rows by number, with the keys in a separate index: a damaged index hides no row, and a damaged
    # page only its own rows. `repair` depends on this layout.
    db.execute(
        "CREATE TABLE IF NOT EXISTS answers "
        "(id INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)"
    )
    db.execute("CREATE UNIQUE INDEX IF NOT EXISTS by_key ON answers (key)")
    return db


def lock_of(path: Path) -> Path:
    """Return the file's lock: shared by users, exclusive for a repair."""
    return path.with_name(path.name + ".lock")


def sibling_files(path: Path) -> list[Path]:
    """Return the WAL and shared-memory files of a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]
