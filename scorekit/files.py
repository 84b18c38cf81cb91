"""Write files and folders atomically: a crash leaves the old content, never a part of the new.

Content that has its final name survives a power cut."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import IO
from uuid import uuid4

#: Error numbers of a full disk, a used-up quota and a file over the size limit.
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Names that `temporary_of` and `_move_aside` give.
_TEMPORARY_NAME = re.compile(r"\.(.+)\.(?:[0-9a-f]{12}\.tmp|gone)", re.DOTALL)


def temporary_of(path: Path) -> Path:
    """Return a path in the same folder that no other process uses, on any machine.

    It is random, because processes in two containers often have the same number."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


def remove_temporaries(folder: Path, names: str = "*", *, deep: bool = False) -> None:
    """Delete the temporary files and folders that killed processes left in a folder.

    Only for the one process that writes these names, before it starts: what another process is
        writing at this moment looks the same.

    names: pattern of the names to clean up, if others write in the folder too. deep: also in
        subfolders.
    """
    for path in list(folder.rglob(".*") if deep else folder.glob(".*")):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and fnmatchcase(match[1], names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".tmp":  # what is deleted is a folder
                path.unlink(missing_ok=True)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(temporary: Path, path: Path) -> None:
    """Flush a finished file, then give it its final name: both survive a power cut."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def put_unsynced(temporary: Path, path: Path) -> None:
    """Give one of many finished files its final name, without a flush.

    The caller flushes them and their folders (`sync`) before anything refers to them."""
    os.replace(temporary, path)


@contextmanager
def with_path_in_error(path: Path) -> Iterator[None]:
    """Raise an OSError that names `path` if the disk is full while it is written.

    The library's own error names no file, or a temporary one. One that names another file stays.
    """
    try:
        yield
    except Exception as error:
        number = _disk_full_error(error)
        name = getattr(error, "filename", None)
        if number is None or (name and not any(map(_TEMPORARY_NAME.fullmatch, Path(name).parts))):
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def _disk_full_error(error: BaseException | None) -> int | None:
    """Return the error number if a full disk is the cause, else None.

    Libraries in Rust (safetensors, tokenizers) have it in their text. torch raises a second error
    while it closes its file."""
    while error is not None:
        for number in _DISK_FULL_ERRORS:
            if getattr(error, "errno", None) == number or f"(os error {number})" in str(error):
                return number
        error = error.__context__
    return None


@contextmanager
def atomic_writer(path: Path, *, alone: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing that replaces `path` at the end of the block.

    It is deleted if the block raises an error (a full disk).
    alone: no other process writes `path` (a lock ensures it), so temporaries of killed processes
    are deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if alone:
        remove_temporaries(path.parent, escape(path.name))
    temporary = temporary_of(path)
    try:
        with with_path_in_error(path):
            with temporary.open("wb") as file:
                yield file
            replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str, *, alone: bool = False) -> None:
    """Write a complete file; text as UTF-8.

    alone: as in `replacing`.
    """
    with atomic_writer(path, alone=alone) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder that gets its final name (`put_folder`) at the end of the block.

    It is deleted if the block raises an error."""
    temporary = temporary_of(folder)
    temporary.mkdir(parents=True)
    try:
        with with_path_in_error(folder):
            yield temporary
            put_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def allow_readers(folder: Path) -> None:
    """Let everyone who may read a folder read the files in it.

    safetensors makes its files readable by their owner alone, whatever the umask is. A server under
    another user could not load them.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode | path.stat().st_mode & 0o777)


def put_folder(temporary: Path, folder: Path) -> None:
    """Flush a finished folder, then give it its final name in place of an existing folder.

    temporary: a folder in the same parent."""
    allow_readers(temporary)
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    deleted = _move_aside(folder)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(deleted, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists. Readers see it vanish at once, even if the process dies."""
    shutil.rmtree(_move_aside(folder), ignore_errors=True)


def _move_aside(folder: Path) -> Path:
    """Rename a folder that is to be deleted, and return its new path.

    The path is always the same, so the next process deletes what a killed one left."""
    deleted = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(deleted, ignore_errors=True)
    if folder.exists():
        folder.rename(deleted)
    return deleted
