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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import structlog

from scorekit.errors import UserError
from synth.folder import salvage
from synth.folder.locks import held, try_lock

log = structlog.get_logger()

#: Environment variable with the password of a Redis: a URL stands in configs and process lists.
REDIS_PASSWORD = "SYNTH_REDIS_PASSWORD"
_CHECKSUM = 8  # bytes
_LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least
_BUSY_S = 60.0  # while other processes write
_REDIS_TRIES = 12  # with pauses of 0.2 to 5 s: three quarters of a minute


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
    check_place(str(where))
    return RedisAnswers(str(where)) if "://" in str(where) else SqliteAnswers(Path(where))


def check_place(where: str) -> None:
    """Raise UserError for what is no place of answers, and for one with a password in it: it would
    stand in the kept config and in logs."""
    if "://" not in where:
        return
    try:
        parts = urlsplit(where)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
        known = parts.scheme in ("redis", "rediss", "unix") and (parts.port or True)
    except ValueError:
        has_password, known = False, False
    if has_password:
        raise UserError(f"run.answers: no password in a URL: put it into {REDIS_PASSWORD}")
    if not known:
        raise UserError(
            "run.answers: give a path, redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH"
        )


class SqliteAnswers:
    """Answers in a SQLite file, which several processes of one machine may share.

    A write is with the kernel when it returns; a power cut may lose the last ones, and never
    leaves a broken file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # ":memory:" is a file, too
        self.damaged = 0
        self._lock = try_lock(_lock(path), shared=True)
        if self._lock is None:
            raise UserError(f"run.answers {path}: is being mended; wait until that is done")
        try:
            self._db = _opened(path)
            self._db.execute("BEGIN IMMEDIATE")  # a file that may not be written says so now,
            self._db.execute("ROLLBACK")  # and not when an answer was paid for
            self._file = _identity(path)
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
        rows = [_row(key, answer) for key, answer in answers.items()]
        if _identity(self.path) != self._file:
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


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may look like a text, and be none
    db.execute(f"PRAGMA page_size={salvage.PAGE}")
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


def mend(path: Path) -> tuple[int, int | None]:
    """Copy what can be read of a damaged file into a new one, which takes its name; the old one
    stays beside it as NAME.damaged.

    (answers kept, rows that cannot be read: None where nothing is wrong and nothing was done; rows
    of which not even the place is known are in no count). Raises UserError while another process
    has the file open.
    """
    with _locked(path, shared=False):
        if _is_whole(path):
            db = _opened(path)
            kept = int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
            db.close()
            return kept, None
        fresh = path.with_name(path.name + ".mended")
        for leftover in (fresh, *_beside(fresh)):
            leftover.unlink(missing_ok=True)
        kept, lost = _salvage(path, fresh)
        old = path.with_name(path.name + ".damaged")
        for leftover in (old, *_beside(old)):
            leftover.unlink(missing_ok=True)
        os.link(path, old)  # at every moment there is a file of that name
        for log_file, name in zip(_beside(path), _beside(old), strict=True):
            if log_file.exists():
                log_file.rename(name)
        os.replace(fresh, path)
        return kept, lost


def _is_whole(path: Path) -> bool:
    """Whether SQLite and the checksums of all values find nothing wrong."""
    log_file = _beside(path)[0]
    if log_file.exists() and log_file.stat().st_size:
        return False  # it may be damaged, too, and SQLite would pass over its end in silence
    try:
        db = _opened(path)
        try:
            if db.execute("PRAGMA integrity_check").fetchall() != [(b"ok",)]:
                return False
            rows = db.execute("SELECT key, value FROM answers")
            return all(unpack(*row) is not None for row in rows)
        finally:
            db.close()
    except sqlite3.Error:
        return False


def _salvage(path: Path, fresh: Path) -> tuple[int, int]:
    """(rows written to a new file, rows of the old one that cannot be read)."""
    new = _opened(fresh)
    lost = 0
    found = salvage.rows(path)
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


@contextmanager
def _locked(path: Path, *, shared: bool) -> Iterator[None]:
    """Hold the lock of a file of answers: shared by those who use it, alone to mend it."""
    with held([(_lock(path), shared)], "mend it"):
        yield


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has the name; None where none has it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _beside(path: Path) -> list[Path]:
    """SQLite's own files of a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]


class RedisAnswers:
    """Answers in a Redis or Valkey, which several machines share. One that is restarted is waited
    for; one that may evict is refused, since a value that goes is paid for again."""

    def __init__(self, url: str) -> None:
        self.damaged = 0
        try:
            import redis
            import redis.asyncio
            import redis.asyncio.retry
            import redis.backoff
        except ImportError:
            raise UserError(
                'run.answers: a Redis needs `pip install -e ".[synth]"` in the checkout'
            ) from None
        self._url = url
        self._error = redis.RedisError
        told: dict[str, Any] = {
            "password": os.environ.get(REDIS_PASSWORD),
            "socket_timeout": 30.0,
            "socket_connect_timeout": 10.0,
        }
        with redis.Redis.from_url(url, **told) as db:
            self._check(db)
        pauses = redis.backoff.ExponentialBackoff(cap=5.0, base=0.2)
        self._db = redis.asyncio.Redis.from_url(
            url,
            **told,
            retry=redis.asyncio.retry.Retry(pauses, _REDIS_TRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )

    def _check(self, db: Any) -> None:
        """Raises UserError where nobody answers, and for a server that may evict."""
        import redis.exceptions

        try:
            db.ping()
            memory = db.info("memory")
        except redis.exceptions.NoPermissionError:  # whoever runs it may keep that to himself
            return
        except redis.RedisError as error:
            raise self._away(error) from None
        policy = str(memory.get("maxmemory_policy", ""))
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise UserError(
                f"run.answers {self._url}: may evict answers that were paid for (maxmemory-policy "
                f"{policy}): set noeviction"
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
            answer = unpack(bytes.fromhex(key), value)
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
        return UserError(
            f"run.answers {self._url}: {error}; start it, give it room, or mend its address"
        )


def _redis_key(key: str) -> bytes:
    return b"synth:" + bytes.fromhex(key)


def _row(key: str, answer: Any) -> tuple[bytes, bytes]:
    raw = bytes.fromhex(key)
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return raw, _checksum(raw, text) + text


def _checksum(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest()


def unpack(key: bytes, value: bytes) -> tuple[Any] | None:
    """The answer, in a tuple since it may be null; None where the value is damaged."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, text):
            return None
        return (json.loads(text),)
    except (ValueError, TypeError):
        return None
