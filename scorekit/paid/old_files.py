"""Files of paid answers as the version before wrote them: they are converted when they are opened.

Their answers had no numbers, each further process of a run had a file beside the main one, and two
commands named their charges by the name of a folder, not by its path.
"""

from __future__ import annotations

import glob
import logging
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from scorekit.errors import UserError
from scorekit.locks import hold_locks, is_locked, try_lock

log = logging.getLogger(__name__)
_RANK_FILE = re.compile(r"-([0-9a-f]{12})-([0-9a-f]{8}-rank[0-9]+|known)")
_RENAMED = ("alternatives", "hallucinations")
_CONVERSION = (
    "BEGIN EXCLUSIVE",
    "ALTER TABLE answers RENAME TO old_answers",
    "CREATE TABLE answers (id INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)",
    "INSERT INTO answers (key, value) SELECT key, value FROM old_answers ORDER BY rowid",
    "CREATE UNIQUE INDEX by_key ON answers (key)",
    "DROP TABLE old_answers",
    "COMMIT",
)
_MERGES = (
    # A damaged answer was paid for again, so the newer one counts.
    "INSERT INTO main.answers (key, value) SELECT key, value FROM other.answers WHERE true "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value",
    "INSERT INTO main.charges (run, server, calls, prompt_tokens, completion_tokens) "
    "SELECT run, server, calls, prompt_tokens, completion_tokens FROM other.charges",
    "INSERT OR IGNORE INTO main.judges SELECT run, model FROM other.judges",
)
#: The names of the files that the main one has.
_CREATE_TAKEN = "CREATE TABLE IF NOT EXISTS taken (name TEXT PRIMARY KEY)"
_TABLES = 3
_COUNT_TABLES = (
    "SELECT count(*) FROM other.sqlite_master WHERE name IN ('answers', 'charges', 'judges')"
)


def convert(path: Path, lock: Path) -> None:
    """Give the answers of a file numbers, in one transaction.

    lock: of the file's users. Raises UserError while a process of the version before has it open,
    sqlite3.Error.
    """
    if not _is_old(path):
        return
    with hold_locks([(lock, False)], "convert it", wait=log.info):
        if not _is_old(path):  # another process has just converted it
            return
        if any(is_locked(lock) for lock in path.parent.glob(f"{glob.escape(path.name)}.*.lock")):
            raise UserError(
                f"{path}: a process of an earlier version has it open. Wait until that process has "
                "ended, or name another file."
            )
        log.info("%s: is converted from an earlier version", path)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous=FULL")
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the file is damaged")
            for statement in _CONVERSION:
                db.execute(statement)


def rename_charges(db: sqlite3.Connection, run: str) -> None:
    """Give the charges of a command the name that it has now: `COMMAND PATH`."""
    command, _, folder = run.partition(" ")
    if command in _RENAMED and folder:
        names = run, f"{command} {Path(folder).name}"
        db.execute("UPDATE charges SET run = ? WHERE run = ?", names)
        db.execute("UPDATE OR IGNORE judges SET run = ? WHERE run = ?", names)


def left_files(path: Path) -> list[Path]:
    """Return the files of further processes whose charges the main file does not have."""
    files = [file for file, _, is_copy in _files_beside(path) if not is_copy]
    if not files:
        return []
    names = set()
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as db:
        names = {name for (name,) in db.execute("SELECT name FROM taken")}
    return [file for file in files if file.name not in names]


def take_over(db: sqlite3.Connection, path: Path, run_hash: str) -> None:
    """Add the left files of further processes to the main one, and remove them.

    run_hash: of the run that opens the file. Files of other runs are taken over as well, unless
    their processes still run. Raises UserError if one of this run does, sqlite3.Error.
    """
    for file, file_run, is_copy in _files_beside(path):
        locked = path if is_copy else file
        lock_path = locked.with_name(f"{locked.name}.{file_run}.lock")
        if is_copy:  # of the answers that the main file had
            if file_run == run_hash or not is_locked(lock_path):
                file.unlink(missing_ok=True)
            continue
        lock = try_lock(lock_path)
        if lock is None:
            if file_run == run_hash:
                raise UserError(
                    f"{file}: a process of an earlier version has it open. Wait until that process "
                    "has ended, or give this run another name."
                )
            continue
        with lock:
            if file.exists():  # else another run has just taken it
                _merge(db, file)
            for end in ("", "-wal", "-shm", f".{file_run}.lock"):
                file.with_name(file.name + end).unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    if not path.is_file():
        return False
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(answers)")]
        return bool(columns) and "id" not in columns
    return False  # no database, or a damaged one


def _files_beside(path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield each old file beside the main one with the hash of its run, and whether it is a copy
    of answers."""
    for file in sorted(path.parent.glob(f"{glob.escape(path.stem)}-*{path.suffix}")):
        match = _RANK_FILE.fullmatch(file.stem, len(path.stem))
        if match:
            yield file, match[1], match[2] == "known"


def _merge(db: sqlite3.Connection, file: Path) -> None:
    """Add a file to the main one, in one transaction that also notes its name."""
    db.execute("ATTACH ? AS other", (str(file),))
    try:
        ((health,),) = db.execute("PRAGMA other.quick_check(1)")
        if health != b"ok":
            raise sqlite3.DatabaseError(f"{file.name} is damaged")
        ((num_tables,),) = db.execute(_COUNT_TABLES)
        with db:  # commits, or rolls back after an error
            db.execute("PRAGMA synchronous=FULL")
            db.execute("BEGIN IMMEDIATE")
            db.execute(_CREATE_TAKEN)
            # A process may have been killed between taking a file over and removing it.
            is_new = db.execute("INSERT OR IGNORE INTO taken VALUES (?)", (file.name,)).rowcount
            # A file without all tables was killed while it was created.
            for statement in _MERGES if is_new and num_tables == _TABLES else ():
                db.execute(statement)
    finally:
        db.execute("DETACH other")
