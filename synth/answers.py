"""Answers that were paid for, under a key of all that they depend on: of this run and of others.

A stage asks here before it asks a service. So a run that is killed, extended, or begun again
under other settings pays only for what nobody has answered yet.

    answers = open_answers("runs/exp001/answers.sqlite")     # one machine, any number of processes
    answers = open_answers("rediss://user@host:6379/0")       # several machines

A value stands behind a checksum of its key and bytes. One that is damaged is no answer: it is
counted, and asked for again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from scorekit.errors import UserError

log = structlog.get_logger()

#: Environment variable with the password of a Redis: a URL stands in configs and process lists.
REDIS_PASSWORD = "SYNTH_REDIS_PASSWORD"
_CHECKSUM = 8  # bytes
_LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least
_BUSY_S = 60.0  # while other processes write


class Answers(Protocol):
    """Where answers are kept. damaged: values that were found broken since it was opened."""

    damaged: int

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one."""

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. kill -9 does not lose them."""

    async def close(self) -> None:
        """Let go of the file or the connections."""


def open_answers(where: str | Path) -> Answers:
    """A SQLite file (a path), or a Redis or Valkey (redis://, rediss://, unix://). Raises
    UserError."""
    if str(where).startswith(("redis://", "rediss://", "unix://")):
        return RedisAnswers(str(where))
    return SqliteAnswers(Path(where))


class SqliteAnswers:
    """Answers in a SQLite file, which several processes of one machine may share.

    A write is with the kernel when it returns; a power cut may lose the last ones, and never
    leaves a broken file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _opened(path)
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"run.answers {path}: {error}; {_MEND}") from None

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one."""
        found: dict[str, Any] = {}
        for start in range(0, len(keys), _LOOKUP):
            some = [bytes.fromhex(key) for key in keys[start : start + _LOOKUP]]
            for key, value in self._rows(some):
                answer = _unpack(key, value)
                if answer is None:
                    self._note_damage(key.hex())
                else:
                    found[key.hex()] = answer[0]
        return found

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. Raises UserError for a full disk
        and for a file that is too damaged to be written."""
        rows = [_row(key, answer) for key, answer in answers.items()]
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


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may look like a text, and be none
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    # Rows by number, and the keys in an index beside them: a damaged index hides no row from
    # `mend`, and a damaged page of rows hides its own only.
    db.execute(
        "CREATE TABLE IF NOT EXISTS answers "
        "(id INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)"
    )
    db.execute("CREATE UNIQUE INDEX IF NOT EXISTS by_key ON answers (key)")
    return db


def mend(path: Path) -> tuple[int, int]:
    """Copy what can be read of a damaged file into a new one, which takes its name; the old one
    stays beside it as NAME.damaged. (answers kept, numbers of rows that gave none).

    Nobody else may have the file open. Raises UserError where it is no SQLite file at all.
    """
    fresh = path.with_name(path.name + ".mended")
    for leftover in (fresh, *_beside(fresh)):
        leftover.unlink(missing_ok=True)
    kept = lost = 0
    try:
        old = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        old.text_factory = bytes
        last = old.execute("SELECT max(id) FROM answers").fetchone()[0] or 0
    except sqlite3.Error as error:
        raise UserError(f"{path}: {error}; delete it: its answers are lost") from None
    new = _opened(fresh)
    ranges = [(start, min(start + 999, last)) for start in range(1, last + 1, 1000)]
    while ranges:
        first, end = ranges.pop()
        try:
            rows = old.execute(
                "SELECT key, value FROM answers NOT INDEXED WHERE id BETWEEN ? AND ?", (first, end)
            ).fetchall()
        except sqlite3.Error:
            if first == end:
                lost += 1
            else:
                middle = (first + end) // 2
                ranges += [(first, middle), (middle + 1, end)]
            continue
        good = [row for row in rows if _unpack(*row) is not None]
        lost += len(rows) - len(good)
        kept += len(good)
        new.execute("BEGIN")
        new.executemany("INSERT OR REPLACE INTO answers (key, value) VALUES (?, ?)", good)
        new.execute("COMMIT")
    old.close()
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new.close()
    os.replace(path, path.with_name(path.name + ".damaged"))
    for leftover in _beside(path):
        leftover.unlink(missing_ok=True)
    os.replace(fresh, path)
    return kept, lost


def _beside(path: Path) -> list[Path]:
    """SQLite's own files of a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]


class RedisAnswers:
    """Answers in a Redis or Valkey, which several machines share. It must not evict: a value that
    goes is paid for again, so give it room and `maxmemory-policy noeviction`."""

    def __init__(self, url: str) -> None:
        self.damaged = 0
        try:
            import redis.asyncio as redis
        except ImportError:
            raise UserError(
                'run.answers: a Redis needs `pip install -e ".[synth]"` in the checkout'
            ) from None
        if "@" in url and ":" in url.rpartition("@")[0].partition("//")[2]:
            raise UserError(f"run.answers: no password in a URL: put it into {REDIS_PASSWORD}")
        self._url = url
        self._error = redis.RedisError
        self._db = redis.from_url(
            url,
            password=os.environ.get(REDIS_PASSWORD),
            socket_timeout=30.0,
            socket_connect_timeout=10.0,
        )

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one. Raises UserError where nobody answers."""
        if not keys:
            return {}
        try:
            values = await self._db.mget([_redis_key(key) for key in keys])
        except self._error as error:
            raise self._away(error) from None
        found: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            answer = _unpack(bytes.fromhex(key), value)
            if answer is None:
                self.damaged += 1
                log.warning("answer_damaged", server=self._url, key=key)
            else:
                found[key] = answer[0]
        return found

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. Raises UserError."""
        rows = {_redis_key(key): _row(key, answer)[1] for key, answer in answers.items()}
        try:
            await self._db.mset(rows)
        except self._error as error:
            raise self._away(error) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._db.aclose()

    def _away(self, error: Exception) -> UserError:
        return UserError(f"run.answers {self._url}: {error}; start it, or mend its address")


def _redis_key(key: str) -> bytes:
    return b"synth:" + bytes.fromhex(key)


def _row(key: str, answer: Any) -> tuple[bytes, bytes]:
    raw = bytes.fromhex(key)
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return raw, _checksum(raw, text) + text


def _checksum(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest()


def _unpack(key: bytes, value: bytes) -> tuple[Any] | None:
    """The answer, in a tuple since it may be null; None where the value is damaged."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, text):
            return None
        return (json.loads(text),)
    except (ValueError, TypeError):
        return None
