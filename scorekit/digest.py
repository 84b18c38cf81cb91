"""Digests of files, cached on disk, because a 46 GB checkpoint takes half a minute to read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from platformdirs import user_cache_path

from scorekit.errors import UserError
from scorekit.files import write_atomic

#: Age from which a file's times can be trusted. A file written twice within the resolution of the
#: clock (2 s on some file systems) keeps its times, size and inode but has other content.
SETTLED_S = 5.0


def digest_files(paths: Iterable[Path]) -> str:
    """Return one 128-bit hex digest over the names and contents of files, in the order of their
    names.

    A file's digest is cached under its path, device, inode, size and times of change.
    Raises UserError if a file changes while it is read.
    """
    parts = sorted((path.name, _digest_file(path)) for path in paths)
    digest_of_all = hashlib.blake2b(digest_size=16)
    for name, digest in parts:
        digest_of_all.update(f"{name}\0{digest}\0".encode())
    return digest_of_all.hexdigest()


def _digest_file(path: Path) -> str:
    stat = path.stat()
    # ctime and mtime: copying tools set the mtime back, nothing sets the ctime.
    is_settled = time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S
    note_path = _note(path, stat)
    if cached := _read_note(note_path):
        return cached
    digest = _read_file(path)
    if _note(path, path.stat()) != note_path:
        raise UserError(f"{path}: changed while it was read; start again when it is complete")
    if is_settled:  # a file that may still change unnoticed is not cached
        with contextlib.suppress(OSError):  # a cache folder that cannot be written only costs time
            write_atomic(note_path, digest)
    return digest


def _read_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _note(path: Path, stat: os.stat_result) -> Path:
    """Return the path of the cached digest for this state of a file.

    Each digest has its own small file, so services that start together do not overwrite each
    other's."""
    state = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    identity = "|".join(map(str, (path.resolve(), *state)))
    name = hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
    return user_cache_path("scorekit") / "digests" / name


def _read_note(note: Path) -> str | None:
    try:
        text = note.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{32}", text) else None
