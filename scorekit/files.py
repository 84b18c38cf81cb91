"""Files and folders that are whole or not there: whoever dies meanwhile leaves the old one, never a
part, and what has its name outlives a power cut."""

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

#: On the disk, in the quota, below the limit of a file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The names of `temporary_of` and of `_without_name`.
_LEFT = re.compile(r"\.(.+)\.(?:[0-9a-f]{12}\.tmp|gone)", re.DOTALL)


def temporary_of(path: Path) -> Path:
    """A name beside it that no other process has, on whichever machine: process numbers of two
    containers are often the same."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


def remove_temporaries(folder: Path, of: str = "*", *, deep: bool = False) -> None:
    """Take away what processes that were killed have left in a folder: files and folders that they
    were writing or deleting. For whoever alone writes there, before he begins: what another is
    writing at this moment looks the same.

    of: pattern of the names that are his, where others write beside. deep: in the folders below,
    too.
    """
    for path in list(folder.rglob(".*") if deep else folder.glob(".*")):
        left = _LEFT.fullmatch(path.name)
        if left and fnmatchcase(left[1], of):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".tmp":  # what is deleted is a folder
                path.unlink(missing_ok=True)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Which file has the name; None where none has it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def sync(path: Path) -> None:
    """Have a file or a folder (which of its names there are) written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(temporary: Path, path: Path) -> None:
    """Give a finished file its name, when its content is on the disk: both outlive a power cut."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def put_unsynced(temporary: Path, path: Path) -> None:
    """The same at once, of one of many files: the caller has them and their folders outlive a power
    cut (`sync`) before anything refers to them."""
    os.replace(temporary, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writes to a file or a folder: where there is no room, raises an OSError that has its
    name, whatever library wrote. A write knows no name, or one that goes (`temporary_of`)."""
    try:
        yield
    except Exception as error:
        number = _no_room(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def _no_room(error: BaseException | None) -> int | None:
    """The number of the error, where there was no room. Libraries in Rust (safetensors, tokenizers)
    have it in their text; torch fails once more while it closes its file."""
    while error is not None:
        for number in _NO_ROOM:
            if getattr(error, "errno", None) == number or f"(os error {number})" in str(error):
                return number
        error = error.__context__
    return None


@contextmanager
def replacing(path: Path, *, alone: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` at the end of the block, or goes where that
    ends with an error (a full disk).

    alone: nobody else writes it (a lock says so), and what a killed process left of it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if alone:
        remove_temporaries(path.parent, escape(path.name))
    temporary = temporary_of(path)
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
            put(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str, *, alone: bool = False) -> None:
    """Write a whole file; text as UTF-8. alone: as in `replacing`."""
    with replacing(path, alone=alone) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name (`put_folder`) at the end of the block, or goes where
    that ends with an error."""
    temporary = temporary_of(folder)
    temporary.mkdir(parents=True)
    try:
        with naming(folder):
            yield temporary
            put_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def allow_readers(folder: Path) -> None:
    """Let whoever may read a folder read the files in it.

    safetensors writes its files for their owner alone, whatever the umask is. A server that runs
    under another user could not load them.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode | path.stat().st_mode & 0o777)


def put_folder(temporary: Path, folder: Path) -> None:
    """Give a finished folder its name, in place of the folder that has it, when all of its content
    is on the disk. temporary: beside it."""
    allow_readers(temporary)
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    gone = _without_name(folder)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if there: for whoever looks it goes at once, whenever the process dies."""
    shutil.rmtree(_without_name(folder), ignore_errors=True)


def _without_name(folder: Path) -> Path:
    """Where a folder is while it is deleted. Always the same place, so that the next process takes
    away what one that was killed has left."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
    return gone
