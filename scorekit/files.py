"""Files and folders that are whole or not there: whoever dies meanwhile leaves the old one, never a
part, and what has its name outlives a power cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4


def temporary_of(path: Path) -> Path:
    """A name beside it that no other process has, on whichever machine: process numbers of two
    containers are often the same."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


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


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` at the end of the block, or goes where that
    ends with an error (a full disk)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            yield file
        put(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a whole file; text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def put_folder(temporary: Path, folder: Path) -> None:
    """Give a finished folder its name, in place of the folder that has it, when all of its content
    is on the disk. temporary: beside it."""
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
