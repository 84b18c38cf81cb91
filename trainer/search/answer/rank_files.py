"""The files of paid answers that the further processes of a run have beside the main one.

Each process writes to a file of its own, because SQLite's shared files do not work over several
machines. The main process takes their answers and charges over into the main file: at the end of
the run, or when the next run begins if this one was killed. All processes read the answers that
the main file has at the start from a copy that nobody changes.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from scorekit.errors import UserError
from trainer.search.answer.answer_cache import (
    PaidAnswerCache,
    files_beside,
    lock_if_free,
    lock_path,
    rank_files,
    run_hash,
)

_TAKEN = "CREATE TABLE IF NOT EXISTS taken (name TEXT PRIMARY KEY)"
_MERGES = (
    # A damaged answer was paid for again, so the newer one counts.
    "INSERT INTO main.answers SELECT key, value FROM other.answers WHERE true "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value",
    "INSERT INTO main.charges (run, server, calls, prompt_tokens, completion_tokens) "
    "SELECT run, server, calls, prompt_tokens, completion_tokens FROM other.charges",
    "INSERT OR IGNORE INTO main.judges SELECT run, model FROM other.judges",
)
_TABLES = "SELECT count(*) FROM other.sqlite_master WHERE name IN ('answers', 'charges', 'judges')"

#: What follows the stem of the main file in the name of a copy; `run_hash` in it.
_KNOWN_FILE = re.compile("-([0-9a-f]{12})-known")


def rank_file(path: Path, run: str, start: str, rank: int) -> Path:
    """Return the file of a further process.

    start: 8 hexadecimal digits of this start of the run. They let a file be taken over once.
    """
    return path.with_name(f"{path.stem}-{run_hash(run)}-{start}-rank{rank}{path.suffix}")


def known_file(path: Path, run: str) -> Path:
    """Return the copy of the answers that the main file had when the run started."""
    return path.with_name(f"{path.stem}-{run_hash(run)}-known{path.suffix}")


def take_over_left(path: Path, run: str) -> None:
    """Take the left files of further processes over, if there are any.

    Only the main process may call it, while its file is closed. Raises UserError.
    """
    path = path.absolute()
    if rank_files(path) or known_file(path, run).exists():
        with closing(PaidAnswerCache(path, run)) as cache:
            take_over(cache, run)
            known_file(path, run).unlink(missing_ok=True)


def take_over(cache: PaidAnswerCache, run: str) -> None:
    """Take answers and charges of left files over into the main file, and remove those files.

    Files of other runs are taken over as well, unless their processes still run. Raises UserError
    if a process of this run still runs.
    """
    for file, file_run in rank_files(cache.path).items():
        lock = lock_if_free(file, file_run)
        if lock is not None:
            try:
                if file.exists():  # else another run has just taken it
                    cache.run_in_thread(lambda db, file=file: _merge(db, file))  # type: ignore[misc]
                _remove(file, file_run)
            finally:
                os.close(lock)
        elif file_run == run_hash(run):
            raise UserError(
                f"answers {file}: another process of the run {run!r} has it open. End that "
                "process, or give this run another name."
            )
    for copy, copy_run in files_beside(cache.path, _KNOWN_FILE).items():
        if copy_run != run_hash(run) and (lock := lock_if_free(cache.path, copy_run)) is not None:
            copy.unlink(missing_ok=True)  # of a run that was killed
            os.close(lock)


def copy_answers(cache: PaidAnswerCache, copy: Path) -> None:
    """Write a copy of the answers that nobody changes, so processes of any machine can read it."""
    copy.unlink(missing_ok=True)

    def work(db: sqlite3.Connection) -> None:
        db.execute("ATTACH ? AS other", (str(copy),))
        try:
            db.execute("CREATE TABLE other.answers (key BLOB PRIMARY KEY, value BLOB NOT NULL)")
            db.execute("INSERT INTO other.answers SELECT key, value FROM main.answers")
        finally:
            db.execute("DETACH other")

    cache.run_in_thread(work)


def opened_copy(copy: Path) -> sqlite3.Connection:
    """Return a connection to such a copy, for any thread. Raises UserError if it is not there."""
    if not copy.is_file():
        raise UserError(
            f"answering.answers: this machine does not have {copy}, which the main process has "
            "written. Name a file in a folder that all machines share."
        )
    uri = f"{copy.absolute().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False)


def _merge(db: sqlite3.Connection, file: Path) -> None:
    """Add a file to the main one, in one transaction that also notes its name."""
    db.execute("ATTACH ? AS other", (str(file),))
    try:
        ((health,),) = db.execute("PRAGMA other.quick_check(1)")
        if health != b"ok":
            raise sqlite3.DatabaseError(f"{file.name} is damaged")
        ((tables,),) = db.execute(_TABLES)
        with db:  # commits, or rolls back after an error
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TAKEN)
            # A process may have been killed between taking a file over and removing it.
            is_new = db.execute("INSERT OR IGNORE INTO taken VALUES (?)", (file.name,)).rowcount
            # A file without all tables was killed while it was created.
            for statement in _MERGES if is_new and tables == 3 else ():
                db.execute(statement)
    finally:
        db.execute("DETACH other")


def _remove(file: Path, file_run: str) -> None:
    for name in (file, *(file.with_name(f"{file.name}-{part}") for part in ("wal", "shm"))):
        name.unlink(missing_ok=True)
    lock_path(file, file_run).unlink(missing_ok=True)
