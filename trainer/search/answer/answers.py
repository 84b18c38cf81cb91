"""What was paid for, in a SQLite file: answers under a key of all that they depend on, and charges.

An answer and its charge are written together, and stand on the disk before anybody is told; so a
run that is killed (-9, or by a power cut) pays for no answer again, and knows what it has spent.
Only calls that were under way when it was killed are lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from scorekit.errors import UserError
from scorekit.files import identity_of
from trainer.search.records import Charge

T = TypeVar("T")

_CHECKSUM = 8  # bytes
_BUSY_S = 60.0  # while other runs write
_TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS charges (id INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "server TEXT NOT NULL, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, "
    "completion_tokens INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS judges (run TEXT PRIMARY KEY, model TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_run ON charges (run, server)",
)


def paid_key(server: str, content: Any) -> bytes:
    """128 bits over all that an answer of a server depends on (what JSON can say)."""
    return hashlib.blake2b(to_json([server, content]), digest_size=16, person=b"paid 1").digest()


def spent_in(path: Path) -> Charge:
    """What all runs together have asked for, as a file says; nothing where there is none yet.
    Raises UserError for one that is no such file, or damaged."""
    if not path.exists():
        return Charge()
    query = "SELECT sum(calls), sum(prompt_tokens), sum(completion_tokens) FROM charges"
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", _BUSY_S, uri=True)
        ) as db:
            calls, prompt, completion = db.execute(query).fetchone()
    except sqlite3.DatabaseError as error:
        told = str(error)
        if "no such table" in told or "unable to open" in told:  # it is being made
            return Charge()
        raise UserError(f"{path}: no file of paid answers, or damaged: {told}") from None
    return Charge(calls=calls or 0, prompt_tokens=prompt or 0, completion_tokens=completion or 0)


class PaidAnswers:
    """The file. Several runs of one machine may share it; a run has one process that opens it.

    damaged: answers that were found broken, and are asked for again. Raises UserError where the
    file cannot be opened, written, or another process of the same run has it.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path.absolute(), run
        self.damaged = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paid-answers")
        self._lock = _locked(self.path, run)
        try:
            self._db = self._thread.submit(_opened, self.path).result()
            self._file = identity_of(self.path)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            os.close(self._lock)
            raise self._trouble(error) from None

    async def get(self, key: bytes) -> dict[str, Any] | None:
        """The answer of a key, if there is one."""
        query = "SELECT value FROM answers WHERE key = ?"
        row = await self._done(lambda db: db.execute(query, (key,)).fetchone())
        if row is None:
            return None
        answer = _unpack(key, row[0])
        self.damaged += answer is None
        return answer

    async def put(self, key: bytes, answer: Mapping[str, Any], server: str, charge: Charge) -> None:
        """Keep an answer and what it took, both or neither; they are on the disk when this
        returns. Raises UserError."""
        await self._written(
            ("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, _pack(key, answer))),
            self._charged(server, charge),
        )

    async def charge(self, server: str, charge: Charge) -> None:
        """Keep what was paid for nothing. Raises UserError."""
        await self._written(self._charged(server, charge))

    def _charged(self, server: str, charge: Charge) -> tuple[str, tuple[Any, ...]]:
        used = (charge.calls, charge.prompt_tokens, charge.completion_tokens)
        return (
            "INSERT INTO charges (run, server, calls, prompt_tokens, completion_tokens) "
            "VALUES (?, ?, ?, ?, ?)",
            (self._run, server, *used),
        )

    async def first_judge(self, model: str) -> str:
        """The judge that the run began with: this one, unless another was named before."""
        await self._written(("INSERT OR IGNORE INTO judges VALUES (?, ?)", (self._run, model)))
        query = "SELECT model FROM judges WHERE run = ?"
        (first,) = await self._done(lambda db: db.execute(query, (self._run,)).fetchone())
        return bytes(first).decode()

    def spent(self) -> dict[str, Charge]:
        """What the run has asked for since it began, by server; without money."""
        query = (
            "SELECT server, sum(calls), sum(prompt_tokens), sum(completion_tokens) FROM charges "
            "WHERE run = ? GROUP BY server"
        )
        ask = self._thread.submit(lambda: self._db.execute(query, (self._run,)).fetchall())
        try:
            rows = ask.result()
        except sqlite3.Error as error:
            raise self._trouble(error) from None
        names = ("calls", "prompt_tokens", "completion_tokens")
        return {
            server.decode(): Charge(**dict(zip(names, sums, strict=True))) for server, *sums in rows
        }

    def close(self) -> None:
        """Close the file, and let another process have the run."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()
        os.close(self._lock)

    async def _written(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    db.execute(statement, values)
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

        if identity_of(self.path) != self._file:
            raise UserError(
                f"answers {self.path}: was deleted or replaced while a run was at work: what is "
                "written now would be lost; put it back, or go on with another file"
            )
        await self._done(write)

    async def _done(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._thread, lambda: work(self._db))
        try:
            return await asyncio.shield(written)  # what was paid for is written though nobody waits
        except sqlite3.Error as error:
            raise self._trouble(error) from None

    def _trouble(self, error: Exception) -> UserError:
        return UserError(
            f"answers {self.path}: {error}; make room, or name another file: what stands in this "
            "one is asked for again"
        )


def judge_of(path: Path, run: str) -> str | None:
    """The judge that a run began with (`PaidAnswers.first_judge`); None where the file knows none.
    Only looks. Raises UserError where the file cannot be read."""
    if not path.is_file():
        return None
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", _BUSY_S, uri=True)
        ) as db:
            found = db.execute("SELECT model FROM judges WHERE run = ?", (run,)).fetchone()
    except sqlite3.Error as error:
        raise UserError(f"answers {path}: {error}") from None
    return None if found is None else str(found[0])


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may look like a text, and be none
    try:
        # A page that is damaged would be met after hours, or be no error but a wrong sum.
        ((health,),) = db.execute("PRAGMA quick_check(1)")
        if health != b"ok":
            raise sqlite3.DatabaseError("the file is damaged")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")  # an answer costs more than a write
        for table in _TABLES:
            db.execute(table)
        db.execute("BEGIN IMMEDIATE")  # a file that may not be written says so now
        db.execute("ROLLBACK")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _locked(path: Path, run: str) -> int:
    """The run's own lock. Raises UserError where another process has it."""
    name = f"{path.name}.{hashlib.sha256(run.encode()).hexdigest()[:12]}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"answers {path}: {error.strerror}; name another file") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            f"answers {path}: another process of the run {run!r} has it: end that one, or give "
            "this run another name"
        ) from None
    return lock


def _pack(key: bytes, answer: Mapping[str, Any]) -> bytes:
    text = to_json(answer)
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest() + text


def _unpack(key: bytes, value: bytes) -> dict[str, Any] | None:
    """None where the value is damaged, or another's."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest():
            return None
        answer: dict[str, Any] = from_json(text)
        return answer
    except (ValueError, TypeError):
        return None
