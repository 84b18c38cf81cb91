"""A store of paid answers in a SQLite file, which several processes of one machine can share.

The owner of a claim lives while it holds its lock file, beside the main one. So there is no clock:
the claims of a dead process, and the money that they reserve, are free at once.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from scorekit.errors import UserError
from scorekit.files import identity_of
from scorekit.locks import is_locked, release, try_lock
from scorekit.paid import old_files
from scorekit.paid.account import Account, ApiUsage, sum_charges
from scorekit.paid.answers import NO_ANSWER, Claim, ClaimState, Space, Store, pack, unpack

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Page size in bytes of our files (SQLite's default).
PAGE = 4096
_LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least
_BUSY_S = 60.0  # while other processes write
#: Tries, and seconds between two of them, to lock a file that another process looks at.
_TRIES, _TRY_S = 10, 0.01
#: Answers by number, with the keys in a separate index: a damaged index hides no row, and a damaged
#: page only its own rows. `repair` depends on this layout.
_TABLES = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(id INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
    "CREATE UNIQUE INDEX IF NOT EXISTS by_key ON answers (key)",
    "CREATE TABLE IF NOT EXISTS charges (id INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "server TEXT NOT NULL, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, "
    "completion_tokens INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_run ON charges (run, server)",
    "CREATE TABLE IF NOT EXISTS judges (run TEXT PRIMARY KEY, model TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS claims (key BLOB PRIMARY KEY, run TEXT NOT NULL, "
    "owner TEXT NOT NULL, server TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, "
    "completion_tokens INTEGER NOT NULL)",
)
_PUT = (
    "INSERT INTO answers (key, value) VALUES (?, ?) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_SUMS = "sum(calls), sum(prompt_tokens), sum(completion_tokens)"


class SqliteStore(Store):
    """A store in a SQLite file. With a run, the file is checked when it is opened."""

    def __init__(self, path: Path, space: Space, run: str | None = None, rank: int = 0) -> None:
        super().__init__()
        self.path = path = path.absolute()  # ":memory:" is a file, too
        self._space, self._run = space, run
        self._locks: list[tuple[Path, IO[str]]] = []
        self._owner = f"{run_hash(run or '')}-{rank}-{uuid4().hex[:8]}"
        #: Sums of the run's charges up to a row, by server.
        self._sums: dict[str, ApiUsage] = {}
        self._last_row = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paid-answers")
        try:
            self._lock(rank)
            self._db = self._thread.submit(self._open, rank).result()
            self._file = identity_of(path)
        except (sqlite3.Error, OSError) as error:
            self._end()
            raise self._file_error(error) from None
        except BaseException:
            self._end()
            raise

    async def get(self, keys: Sequence[bytes]) -> dict[bytes, Any]:
        """Return the answers of those keys that have one. Raises UserError."""
        return await self._execute(lambda db: self._answers(db, keys))

    async def put(self, answers: Mapping[bytes, Any]) -> None:
        """Store answers, all or none of them; kill -9 does not lose them. Raises UserError."""
        rows = [(key, pack(key, answer)) for key, answer in answers.items()]

        def write(db: sqlite3.Connection) -> None:
            with self._transaction(db, is_synced=self._run is not None):
                db.executemany(_PUT, rows)

        await self._execute(write)

    async def begin(self, key: bytes, server: str, limit: ApiUsage, account: Account) -> Claim:
        """Claim a key for a call of at most this usage. Raises UserError."""

        def work(db: sqlite3.Connection) -> Claim:
            with self._transaction(db, is_synced=False):  # a power cut ends the owner, too
                return self._begin(db, key, server, limit, account)

        return await self._execute(work)

    async def finish(
        self, key: bytes, server: str, usage: ApiUsage, answer: Any = NO_ANSWER
    ) -> dict[str, ApiUsage]:
        """Store answer and usage and end the claim, all or nothing. Raises UserError."""
        value = None if answer is NO_ANSWER else pack(key, answer)
        used = (usage.calls, usage.prompt_tokens, usage.completion_tokens)

        def work(db: sqlite3.Connection) -> dict[str, ApiUsage]:
            with self._transaction(db, is_synced=value is not None or usage.calls > 0):
                if value is not None:
                    db.execute(_PUT, (key, value))
                if usage.calls:
                    db.execute(
                        "INSERT INTO charges (run, server, calls, prompt_tokens, "
                        "completion_tokens) VALUES (?, ?, ?, ?, ?)",
                        (self._run, server, *used),
                    )
                db.execute("DELETE FROM claims WHERE key = ? AND owner = ?", (key, self._owner))
            return self._spent_now(db)

        return await self._execute(work)

    async def first_judge(self, model: str) -> str:
        """Return the first judge of the run: `model`, unless another one is stored."""

        def work(db: sqlite3.Connection) -> str:
            with self._transaction(db, is_synced=True):
                db.execute("INSERT OR IGNORE INTO judges VALUES (?, ?)", (self._run, model))
                query = "SELECT model FROM judges WHERE run = ?"
                return str(db.execute(query, (self._run,)).fetchone()[0].decode())

        return await self._execute(work)

    async def close(self) -> None:
        """End the claims of this process, and close the file. A second call does nothing."""
        if not self._locks:
            return

        def work() -> None:
            with suppress(sqlite3.Error):
                self._db.execute("DELETE FROM claims WHERE owner = ?", (self._owner,))
            self._db.close()

        await asyncio.wrap_future(self._thread.submit(work))
        self._end()

    # -- opening -----------------------------------------------------------------------------------

    def _lock(self, rank: int) -> None:
        """Lock the file for its users, and the run for this process. Raises UserError, OSError."""
        old_files.convert(self.path, lock_of(self.path))
        users = try_lock(lock_of(self.path), shared=True)
        if users is None:
            raise UserError(
                f"{self._space.setting} {self.path}: is being repaired. Wait until that is done"
            )
        self._locks.append((lock_of(self.path), users))
        if self._run is None:
            return
        path, first = (_run_lock(self.path, run_hash(self._run), n) for n in (rank, 0))
        lock = next(filter(None, (_try_once(path) for _ in range(_TRIES))), None)
        live_ranks = self._ranks_alive(path) if not rank else []
        if lock is None or live_ranks:
            if lock is not None:
                lock.close()
            raise UserError(
                f"{self._space.setting} {self.path}: another process of the run {self._run!r} has "
                "it open. End that process, or give this run another name."
            )
        self._locks.append((path, lock))
        if not (is_locked(path) and is_locked(first)):
            problem = "the first process of the run does not have it open, or " if rank else ""
            raise UserError(
                f"{self._space.setting} {self.path}: {problem}locks have no effect between "
                "processes on this file system. Put the file on a disk of this machine, or name a "
                "Redis (redis://HOST:PORT/0)."
            )

    def _ranks_alive(self, lock: Path) -> list[Path]:
        """Return the locks of further processes of an earlier start, which still run."""
        names = self.path.parent.glob(f"{glob.escape(lock.stem)}-*.lock")
        return [path for path in names if is_locked(path)]

    def _open(self, rank: int) -> sqlite3.Connection:
        if self._run is None:
            db = open_database(self.path)
            with self._transaction(db, is_synced=False):  # a read-only file must fail now
                return db
        db = open_database(self.path, is_checked=not rank)
        try:
            with self._transaction(db, is_synced=True):
                if rank:
                    return db
                old_files.rename_charges(db, self._run)
                rows = db.execute(
                    "SELECT server, count(*), sum(prompt_tokens), sum(completion_tokens) "
                    "FROM claims WHERE run = ? GROUP BY server",
                    (self._run,),
                )
                self.unfinished = _usages(rows)
                db.execute("DELETE FROM claims WHERE run = ?", (self._run,))
            old_files.take_over(db, self.path, run_hash(self._run))
            self.spent = self._spent_now(db)
        except BaseException:
            db.close()
            raise
        return db

    def _end(self) -> None:
        self._thread.shutdown()
        for path, lock in self._locks[1:]:
            release(path, lock)  # of the run
        for _, lock in self._locks[:1]:
            lock.close()
        self._locks = []

    # -- within the thread -------------------------------------------------------------------------

    def _answers(self, db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Any]:
        answers = {}
        for start in range(0, len(keys), _LOOKUP):
            for key, value in self._rows(db, keys[start : start + _LOOKUP]):
                answer = unpack(key, value)
                if answer is NO_ANSWER:
                    self._note_damage(key)
                else:
                    answers[key] = answer
        return answers

    def _rows(self, db: sqlite3.Connection, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        marks = ",".join("?" * len(keys))
        query = f"SELECT key, value FROM answers WHERE key IN ({marks})"
        try:
            return db.execute(query, keys).fetchall()
        except sqlite3.DatabaseError as error:
            # locked, or the disk: not the file
            if self._run is not None or isinstance(error, sqlite3.OperationalError):
                raise
        if len(keys) > 1:  # only the rows of a damaged page are lost
            return [row for key in keys for row in self._rows(db, [key])]
        self._note_damage(keys[0])
        return []

    def _note_damage(self, key: bytes) -> None:
        self.damaged += 1
        log.warning("%s: the answer %s is damaged", self.path, key.hex())

    def _begin(
        self, db: sqlite3.Connection, key: bytes, server: str, limit: ApiUsage, account: Account
    ) -> Claim:
        answers = self._answers(db, [key])
        if key in answers:
            return Claim(ClaimState.ANSWER, answers[key])
        row = db.execute("SELECT owner FROM claims WHERE key = ?", (key,)).fetchone()
        if row is not None and self._is_alive(owner := row[0].decode()) and owner != self._owner:
            return Claim(ClaimState.WAIT)
        if account.cap is not None:
            spent = self._spent_now(db)
            reserved = self._reserved_money(db, account)
            if not account.fits(account.cost(spent), reserved, server, limit):
                self._drop_dead(db)
                query = "SELECT count(*) FROM claims WHERE run = ?"
                in_flight = db.execute(query, (self._run,)).fetchone()[0]
                reserved = self._reserved_money(db, account)
                if not account.fits(account.cost(spent), reserved, server, limit):
                    return Claim(ClaimState.WAIT if in_flight else ClaimState.REFUSED, spent=spent)
        db.execute(
            "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?)",
            (key, self._run, self._owner, server, limit.prompt_tokens, limit.completion_tokens),
        )
        return Claim(ClaimState.OURS)

    def _reserved_money(self, db: sqlite3.Connection, account: Account) -> float:
        rows = db.execute(
            "SELECT server, count(*), sum(prompt_tokens), sum(completion_tokens) FROM claims "
            "WHERE run = ? GROUP BY server",
            (self._run,),
        )
        return account.cost(_usages(rows))

    def _drop_dead(self, db: sqlite3.Connection) -> None:
        """Free the claims of processes that have ended, and the money that they reserve."""
        owners = db.execute("SELECT DISTINCT owner FROM claims WHERE run = ?", (self._run,))
        for (owner,) in owners.fetchall():
            if not self._is_alive(owner.decode()):
                db.execute("DELETE FROM claims WHERE owner = ?", (owner.decode(),))

    def _is_alive(self, owner: str) -> bool:
        run, rank, _ = owner.split("-")
        return owner == self._owner or is_locked(_run_lock(self.path, run, int(rank)))

    def _spent_now(self, db: sqlite3.Connection) -> dict[str, ApiUsage]:
        """Return the usage of the run by server. Charges are only added, so old ones are summed
        once."""
        row = db.execute("SELECT max(id) FROM charges").fetchone()
        last = row[0] or 0
        rows = db.execute(
            f"SELECT server, {_SUMS} FROM charges WHERE id > ? AND id <= ? AND +run = ? "
            "GROUP BY server",
            (self._last_row, last, self._run),
        )
        for server, usage in _usages(rows).items():
            self._sums[server] = sum_charges([self._sums.get(server, ApiUsage()), usage])
        self._last_row = last
        return dict(self._sums)

    @contextmanager
    def _transaction(self, db: sqlite3.Connection, *, is_synced: bool) -> Iterator[None]:
        """Run the block in a transaction.

        is_synced: it is on the disk when the block has ended.
        """
        if hasattr(self, "_file") and identity_of(self.path) != self._file:
            raise UserError(
                f"{self._space.setting} {self.path}: was deleted or replaced during a run, so new "
                "answers would be lost. Restore it, or continue with another file."
            )
        db.execute(f"PRAGMA synchronous={'FULL' if is_synced else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    async def _execute(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, lambda: work(self._db))
        try:
            # A paid answer is written even if the caller is cancelled.
            return await asyncio.shield(done)
        except sqlite3.Error as error:
            raise self._file_error(error) from None

    def _file_error(self, error: Exception) -> UserError:
        return UserError(
            f"{self._space.setting} {self.path}: {error}. Free disk space, or name another file "
            f"(the answers in this file are then paid for again). {self._space.repair} keeps what "
            "can be read of a damaged file."
        )


def spent_in_file(path: Path) -> ApiUsage:
    """Return the usage of all runs in a file; zero if there is no file yet. Raises UserError."""
    files = [path, *old_files.left_files(path)]
    return sum_charges(usage for file in files for usage in _charges_in(file).values())


def _charges_in(path: Path) -> dict[str, ApiUsage]:
    if not path.exists():
        return {}
    try:
        with closing(read_only(path)) as db:
            return _usages(db.execute(f"SELECT 'all', {_SUMS} FROM charges"))
    except sqlite3.DatabaseError as error:
        message = str(error)
        # Another process creates it now.
        if "no such table" in message or "unable to open" in message:
            return {}
        raise UserError(f"{path}: damaged, or not a file of paid answers: {message}") from None


def judge_in_file(path: Path, space: Space, run: str) -> str | None:
    """Return the first judge of a run, or None. Raises UserError if the file cannot be read."""
    if not path.is_file():
        return None
    try:
        with closing(read_only(path)) as db:
            row = db.execute("SELECT model FROM judges WHERE run = ?", (run,)).fetchone()
    except sqlite3.Error as error:
        raise UserError(f"{space.setting} {path}: {error}") from None
    return None if row is None else str(row[0].decode())


def open_database(path: Path, *, is_checked: bool = False) -> sqlite3.Connection:
    """Open the file; create it if it does not exist. Raises sqlite3.Error.

    is_checked: whether damage is an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    db.text_factory = bytes  # a damaged value may not be valid text
    try:
        if is_checked:
            # Without this check a damaged page fails hours later, or gives a wrong sum.
            ((health,),) = db.execute("PRAGMA quick_check(1)")
            if health != b"ok":
                raise sqlite3.DatabaseError("the file is damaged")
        db.execute(f"PRAGMA page_size={PAGE}")
        db.execute("PRAGMA journal_mode=WAL")
        for statement in _TABLES:
            db.execute(statement)
    except BaseException:
        db.close()
        raise
    return db


def read_only(path: Path) -> sqlite3.Connection:
    """Open a file that is there, to read it. Raises sqlite3.Error."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", _BUSY_S, uri=True)
    db.text_factory = bytes
    return db


def run_hash(run: str) -> str:
    """Return the short form of a run's name in names of files."""
    return hashlib.sha256(run.encode()).hexdigest()[:12]


def lock_of(path: Path) -> Path:
    """Return the file's lock: shared by users, exclusive for a repair."""
    return path.with_name(path.name + ".lock")


def sibling_files(path: Path) -> list[Path]:
    """Return the WAL and shared-memory files of a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]


def _run_lock(path: Path, run: str, rank: int) -> Path:
    """Return the lock of a process of a run, by its `run_hash`."""
    return path.with_name(f"{path.name}.{run}{f'-{rank}' if rank else ''}.lock")


def _try_once(path: Path) -> IO[str] | None:
    """Lock a file. Another process may hold it for a moment, to see whether its owner lives."""
    lock = try_lock(path)
    if lock is None:
        time.sleep(_TRY_S)
    return lock


def _usages(rows: Iterator[tuple[bytes, int, int, int]] | sqlite3.Cursor) -> dict[str, ApiUsage]:
    names = ("calls", "prompt_tokens", "completion_tokens")
    return {
        server.decode() if isinstance(server, bytes) else server: ApiUsage(
            **dict(zip(names, (value or 0 for value in sums), strict=True))
        )
        for server, *sums in rows
    }
