"""Store records in an unnamed temporary file to bound memory."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from scorekit.errors import UserError

T = TypeVar("T")


class DiskSpool(Generic[T]):
    """Records in the order in which they were added, each with a key or without one.

    They are stored as JSON in the folder for temporary files (TMPDIR) until the process ends; at
    most 2 MB are in memory. A tuple in them becomes a list. kind: a dataclass with JSON fields, or
    a JSON type. compressed: of long records. Raises UserError if the disk is full.
    """

    def __init__(self, kind: type[T], *, compressed: bool = False) -> None:
        self._kind, self._has_fields, self._count = kind, is_dataclass(kind), 0
        self._compressed = compressed
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE things (key TEXT, line TEXT)")
        self._db.execute("CREATE INDEX by_key ON things (key) WHERE key IS NOT NULL")

    def append(self, record: T, key: str | None = None) -> None:
        """Add a record at the end."""
        text = json.dumps(record, default=_values)
        line = zlib.compress(text.encode(), 1) if self._compressed else text
        with _disk_full_as_user_error():
            self._db.execute("INSERT INTO things VALUES (?, ?)", (key, line))
        self._count += 1

    def get_all(self, key: str) -> list[T]:
        """Return the records with a key."""
        return list(self._select("WHERE key = ? ORDER BY rowid", key))

    def get(self, key: str) -> T | None:
        """Return the last record with a key, or None."""
        return next(self._select("WHERE key = ? ORDER BY rowid DESC LIMIT 1", key), None)

    def __getitem__(self, key: str) -> T:
        """Return the last record with a key. Raises KeyError without one."""
        record = self.get(key)
        if record is None:
            raise KeyError(key)
        return record

    def __iter__(self) -> Iterator[T]:
        return self._select("ORDER BY rowid")

    def __len__(self) -> int:
        return self._count

    def _select(self, which: str, *values: str) -> Iterator[T]:
        with _disk_full_as_user_error():
            for (line,) in self._db.execute(f"SELECT line FROM things {which}", values):
                record = json.loads(zlib.decompress(line) if self._compressed else line)
                yield self._kind(*record) if self._has_fields else record


def _values(record: Any) -> list[Any]:
    """Return the values of a dataclass in the order of its fields."""
    return [getattr(record, field.name) for field in fields(record)]


@contextmanager
def _disk_full_as_user_error() -> Iterator[None]:
    """Raise a UserError if temporary files fail because the disk is full."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UserError(
            f"no space for temporary files ({error}). Name another folder with TMPDIR=FOLDER."
        ) from None


def in_groups(items: Iterable[T], max_size: int) -> Iterator[list[T]]:
    """Yield lists of at most `max_size` items."""
    remaining = iter(items)
    while group := list(islice(remaining, max_size)):
        yield group
