"""Digests of files, remembered, because a 46 GB checkpoint takes half a minute to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from platformdirs import user_cache_path


def digest_files(paths: Iterable[Path]) -> str:
    """One 128-bit hex digest over the names and contents of files, in the order of their names.

    A file's digest is remembered under its path, size, mtime and inode.
    """
    remembered = _read_memory()
    whole = hashlib.blake2b(digest_size=16)
    news: dict[str, str] = {}
    for path in sorted(paths, key=lambda p: p.name):
        stat = path.stat()
        identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if identity not in remembered:
            remembered[identity] = news[identity] = _digest_file(path)
        whole.update(f"{path.name}\0{remembered[identity]}\0".encode())
    if news:
        _write_memory(_read_memory() | news)
    return whole.hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _memory_path() -> Path:
    return user_cache_path("scorekit") / "digests.json"


def _read_memory() -> dict[str, str]:
    try:
        memory = json.loads(_memory_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _write_memory(memory: dict[str, str]) -> None:
    # A cache folder that cannot be written costs time, not correctness.
    with contextlib.suppress(OSError):
        path = _memory_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(memory, file)
        os.replace(temporary, path)
