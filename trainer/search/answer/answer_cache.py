"""Store paid answers and their usage in a SQLite file, by a key of all that an answer depends on.

An answer and its usage are written together and are on disk before a caller gets them. So a run
that is killed (-9, or by a power cut) pays for no answer twice, and knows what it has spent. Only
pending calls are lost.

Each further process of a run has a file of its own beside the main one (rank_files.py).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from scorekit.errors import UserError
from scorekit.files import identity_of
from trainer.search.answer.spending import sum_charges
from trainer.search.records import ApiUsage

T = TypeVar("T")

_CHECKSUM = 8  # bytes
_BUSY_S = 60.0  # while other runs write
_RANK_FILE = re.compile(r"-([0-9a-f]{12})-[0-9a-f]{8}-rank[0-9]+")
_SUMS = "SELECT sum(calls), sum(prompt_tokens), sum(completion_tokens) FROM charges"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS charges (id INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "server TEXT NOT NULL, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, "
    "completion_tokens INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS judges (run TEXT PRIMARY KEY, model TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_run ON charges (run, server)",
)


def paid_key(server: str, content: Any) -> bytes:
    """Return a hash of 128 bits of all that an answer of a server depends on (JSON values)."""
    return hashlib.blake2b(to_json([server, content]), digest_size=16, person=b"paid 1").digest()


def spent_in(path: Path) -> ApiUsage:
    """Return the usage of all runs in a file; zero if there is no file yet.

    What further processes of a run have in files of their own counts as well. Raises UserError for
    another kind of file, or a damaged one.
    """
    files_of_ranks = rank_files(path)
    merged_names = _merged_names(path) if files_of_ranks else set()
    return sum_charges(
        _spent_in_one(file) for file in (path, *files_of_ranks) if file.name not in merged_names
    )


def rank_files(path: Path) -> dict[Path, str]:
    """Return the files of further processes beside a main file, and the `run_hash` of each."""
    return files_beside(path, _RANK_FILE)


def files_beside(path: Path, ending: re.Pattern[str]) -> dict[Path, str]:
    """Return the files beside a main file whose stem is its stem and an ending, in their order.

    The values are the first group of the ending.
    """
    if not path.parent.is_dir():
        return {}
    files = [file for file in sorted(path.parent.iterdir()) if file.suffix == path.suffix]
    matches = [
        (file, ending.fullmatch(file.stem, len(path.stem)))
        for file in files
        if file.stem.startswith(path.stem)
    ]
    return {file: match[1] for file, match in matches if match}


def run_hash(run: str) -> str:
    """Return the short form of a run's name in names of files."""
    return hashlib.sha256(run.encode()).hexdigest()[:12]


def _merged_names(path: Path) -> set[str]:
    """Return the names of the rank files whose content the main file has."""
    try:
        with closing(_read_only(path)) as db:
            return {str(name) for (name,) in db.execute("SELECT name FROM taken")}
    except sqlite3.DatabaseError:  # no file, or none was ever taken
        return set()


def _spent_in_one(path: Path) -> ApiUsage:
    if not path.exists():
        return ApiUsage()
    try:
        with closing(_read_only(path)) as db:
            calls, prompt, completion = db.execute(_SUMS).fetchone()
    except sqlite3.DatabaseError as error:
        message = str(error)
        # Another process creates it now.
        if "no such table" in message or "unable to open" in message:
            return ApiUsage()
        raise UserError(f"{path}: damaged, or not a file of paid answers: {message}") from None
    return ApiUsage(calls=calls or 0, prompt_tokens=prompt or 0, completion_tokens=completion or 0)


class PaidAnswerCache:
    """A file of paid answers. Several runs of one machine may share it; one process per run.

    damaged: number of damaged answers, which are requested again. Raises UserError if the file
    cannot be opened or written, or if another process of the same run has it open.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path.absolute(), run
        self.damaged = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paid-answers")
        self._lock = locked(self.path, run)
        try:
            self._db = self._thread.submit(_opened, self.path).result()
            self._file = identity_of(self.path)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            os.close(self._lock)
            raise self._file_error(error) from None

    async def get(self, key: bytes) -> dict[str, Any] | None:
        """Return the answer of a key, or None."""
        query = "SELECT value FROM answers WHERE key = ?"
        row = await self._execute(lambda db: db.execute(query, (key,)).fetchone())
        return self._unpacked(key, row)

    def _unpacked(self, key: bytes, row: tuple[bytes] | None) -> dict[str, Any] | None:
        """Return the answer of a row; None if there is none, or if it is damaged."""
        if row is None:
            return None
        answer = _unpack(key, row[0])
        self.damaged += answer is None
        return answer

    @asynccontextmanager
    async def claimed(self, key: bytes) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the answer of a key; None: the caller pays for it, within this block."""
        yield await self.get(key)

    async def put(
        self, key: bytes, answer: Mapping[str, Any], server: str, charge: ApiUsage
    ) -> None:
        """Store an answer and its usage, both or neither; they are on disk when this returns.

        Raises UserError.
        """
        await self._write(
            ("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, _pack(key, answer))),
            self._charge_statement(server, charge),
        )

    async def put_known(self, answers: Iterable[tuple[bytes, Mapping[str, Any]]]) -> None:
        """Store answers that another process of the run has paid for. Raises UserError."""
        statement = "INSERT OR IGNORE INTO answers VALUES (?, ?)"
        await self._write(*((statement, (key, _pack(key, answer))) for key, answer in answers))

    async def charge(self, server: str, charge: ApiUsage) -> None:
        """Store the usage of a call without an answer. Raises UserError."""
        await self._write(self._charge_statement(server, charge))

    def _charge_statement(self, server: str, charge: ApiUsage) -> tuple[str, tuple[Any, ...]]:
        used = (charge.calls, charge.prompt_tokens, charge.completion_tokens)
        return (
            "INSERT INTO charges (run, server, calls, prompt_tokens, completion_tokens) "
            "VALUES (?, ?, ?, ?, ?)",
            (self._run, server, *used),
        )

    async def first_judge(self, model: str) -> str:
        """Return the first judge of the run: `model`, unless another one is stored."""
        await self._write(("INSERT OR IGNORE INTO judges VALUES (?, ?)", (self._run, model)))
        query = "SELECT model FROM judges WHERE run = ?"
        (first,) = await self._execute(lambda db: db.execute(query, (self._run,)).fetchone())
        return bytes(first).decode()

    def spent(self) -> dict[str, ApiUsage]:
        """Return the usage of the run by server, without its price."""
        query = (
            "SELECT server, sum(calls), sum(prompt_tokens), sum(completion_tokens) FROM charges "
            "WHERE run = ? GROUP BY server"
        )
        rows = self.run_in_thread(lambda db: db.execute(query, (self._run,)).fetchall())
        names = ("calls", "prompt_tokens", "completion_tokens")
        return {
            server.decode(): ApiUsage(**dict(zip(names, sums, strict=True)))
            for server, *sums in rows
        }

    def run_in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of work on the database, without an event loop. Raises UserError."""
        try:
            return self._thread.submit(lambda: work(self._db)).result()
        except sqlite3.Error as error:
            raise self._file_error(error) from None

    def close(self) -> None:
        """Close the file and release the lock of the run."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()
        os.close(self._lock)

    async def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        def write(db: sqlite3.Connection) -> None:
            with db:  # commits, or rolls back after an error
                db.execute("BEGIN IMMEDIATE")
                for statement, values in statements:
                    db.execute(statement, values)

        if identity_of(self.path) != self._file:
            raise UserError(
                f"answers {self.path}: deleted or replaced during a run, so new answers would be "
                "lost. Restore it, or continue with another file."
            )
        await self._execute(write)

    async def _execute(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._thread, lambda: work(self._db))
        try:
            # A paid answer is written even if the caller is cancelled.
            return await asyncio.shield(written)
        except sqlite3.Error as error:
            raise self._file_error(error) from None

    def _file_error(self, error: Exception) -> UserError:
        return UserError(
            f"answers {self.path}: {error}. Free disk space, or name another file (the answers in "
            "this file are then paid for again)."
        )


def judge_of(path: Path, run: str) -> str | None:
    """Return the first judge of a run (`PaidAnswerCache.first_judge`), or None.

    Only reads the file.

    Raises UserError if the file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        with closing(_read_only(path)) as db:
            row = db.execute("SELECT model FROM judges WHERE run = ?", (run,)).fetchone()
    except sqlite3.Error as error:
        raise UserError(f"answers {path}: {error}") from None
    return None if row is None else str(row[0])


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", _BUSY_S, uri=True)


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.text_factory = bytes  # a damaged value may not be valid text
    try:
        # Without this check a damaged page fails hours later, or gives a wrong sum.
        ((health,),) = db.execute("PRAGMA quick_check(1)")
        if health != b"ok":
            raise sqlite3.DatabaseError("the file is damaged")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")  # an answer costs more than a write
        for table in _TABLES:
            db.execute(table)
        db.execute("BEGIN IMMEDIATE")  # fails now if the file is not writable
        db.execute("ROLLBACK")
    except sqlite3.Error:
        db.close()
        raise
    return db


def locked(path: Path, run: str) -> int:
    """Return the locked file of the run. Raises UserError if another process has the lock."""
    lock = lock_if_free(path, run_hash(run))
    if lock is None:
        raise UserError(
            f"answers {path}: another process of the run {run!r} has it open. End that process, or "
            "give this run another name."
        )
    return lock


def lock_if_free(path: Path, run: str) -> int | None:
    """Return the locked file of a run, by its `run_hash`; None if another process has the lock.

    Raises UserError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_path(path, run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"answers {path}: {error.strerror}. Name another file.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def lock_path(path: Path, run: str) -> Path:
    """Return the path of the lock of a file for a run, by its `run_hash`."""
    return path.with_name(f"{path.name}.{run}.lock")


def _pack(key: bytes, answer: Mapping[str, Any]) -> bytes:
    text = to_json(answer)
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest() + text


def _unpack(key: bytes, value: bytes) -> dict[str, Any] | None:
    """Return the answer; None if the value is damaged or belongs to another key."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest():
            return None
        answer: dict[str, Any] = from_json(text)
        return answer
    except (ValueError, TypeError):
        return None
