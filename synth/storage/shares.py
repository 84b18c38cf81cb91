"""Assign the shards of a stage to processes: a fixed part, or every free one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scorekit.locks import holder, release, try_lock


@dataclass(frozen=True, slots=True)
class ShardShare:
    """The share of this process in the shards of a stage, or in the files of the corpus.

    shard_id: number of this machine.
    num_shards: number of machines.
    takes_all: takes every free shard, not only its own, and waits for other processes.
    """

    shard_id: int = 0
    num_shards: int = 1
    takes_all: bool = False

    def assigned(self, shards: int) -> range:
        """Return the shards assigned to this process."""
        return range(self.shard_id, shards, self.num_shards)

    def candidates(self, shards: int) -> range:
        """Return the shards that this process may take."""
        return range(shards) if self.takes_all else self.assigned(shards)


class WorkClaims:
    """Hands out shards or files that are neither done nor locked by another process.

    todo: their numbers.
    done: returns True if a number is done.
    path: returns the path of its lock.
    """

    def __init__(
        self, todo: Iterable[int], done: Callable[[int], bool], path: Callable[[int], Path]
    ) -> None:
        self.left = list(todo)  # neither done nor handed out
        self._done, self._path = done, path

    def next(self) -> tuple[int, IO[str]] | None:
        """Return a number with its lock; None if other processes have all remaining ones."""
        for index in list(self.left):
            if not self._done(index):
                lock = try_lock(self._path(index))
                if lock is None:
                    continue
                if not self._done(index):
                    self.left.remove(index)
                    return index, lock
                release(self._path(index), lock)
            self.left.remove(index)  # another process has done it
        return None

    def waits_for(self) -> str:
        """Return the owner of the first remaining number."""
        return holder(self._path(self.left[0]))
