"""What grows with the episodes: on the disk, in a file that no name leads to."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from scorekit.errors import UserError

T = TypeVar("T")


class Spool(Generic[T]):
    """Things in the order in which they were put there, each of them under a key or under none.

    They lie as JSON in the folder for temporary files (TMPDIR), and go with the process, whatever
    ends it; memory has 2 MB of them at most. What is a tuple in them comes back as a list.

    kind: a dataclass whose fields are what JSON has, or a type that JSON has. Raises UserError
    where there is no room.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind, self._has_fields, self._count = kind, is_dataclass(kind), 0
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE things (key TEXT, line TEXT)")
        self._db.execute("CREATE INDEX by_key ON things (key) WHERE key IS NOT NULL")

    def append(self, thing: T, key: str | None = None) -> None:
        """Put one behind the others."""
        line = json.dumps(thing, default=_values)
        with room():
            self._db.execute("INSERT INTO things VALUES (?, ?)", (key, line))
        self._count += 1

    def under(self, key: str) -> list[T]:
        """Those with that key."""
        return list(self._found("WHERE key = ? ORDER BY rowid", key))

    def get(self, key: str) -> T | None:
        """The last with that key; None: there is none."""
        return next(self._found("WHERE key = ? ORDER BY rowid DESC LIMIT 1", key), None)

    def __getitem__(self, key: str) -> T:
        """The same, where there must be one."""
        thing = self.get(key)
        if thing is None:
            raise KeyError(key)
        return thing

    def __iter__(self) -> Iterator[T]:
        return self._found("ORDER BY rowid")

    def __len__(self) -> int:
        return self._count

    def _found(self, which: str, *values: str) -> Iterator[T]:
        with room():
            for (line,) in self._db.execute(f"SELECT line FROM things {which}", values):
                thing = json.loads(line)
                yield self._kind(*thing) if self._has_fields else thing


def _values(thing: Any) -> list[Any]:
    """Of a dataclass, in the order of its fields."""
    return [getattr(thing, field.name) for field in fields(thing)]


@contextmanager
def room() -> Iterator[None]:
    """Around what is put into temporary files and taken out. Raises UserError where there is no
    room for them."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise UserError(
            f"no room for temporary files ({error}): name a folder that has some: TMPDIR=FOLDER"
        ) from None


def in_groups(things: Iterable[T], most: int) -> Iterator[list[T]]:
    """So many at a time."""
    left = iter(things)
    while group := list(islice(left, most)):
        yield group
