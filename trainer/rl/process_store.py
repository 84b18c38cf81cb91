"""Small values that the processes of a run share, in the store that they were started with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.rl.barrier import ProcessStalled


class ProcessStore:
    """Values by key, held by the first process of a run. Threads may share it.

    Values are text and numbers, so that nobody reads an object of another process. Raises
    ProcessStalled if the first process has ended.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Keep a torch store.

        rank, size: index of this process, and number of processes.
        """
        self._store, self.rank, self.size = store, rank, size

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None. Nobody may delete it at the same time."""
        with self._reached():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        with self._reached():
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0, and return the sum."""
        with self._reached():
            return int(self._store.add(key, amount))

    def replace(self, key: str, expected: str, value: str) -> str:
        """Set the value of a key if it is `expected`, and return the value that it has now.

        expected: "" if there is no value. A caller learns from the returned value whether it was
        set, so each writes a value of its own.
        """
        with self._reached():
            return bytes(self._store.compare_set(key, expected, value)).decode()

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        with self._reached():
            self._store.delete_key(key)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessStalled(
                f"process {self.rank} of {self.size} cannot reach the store of the processes, so "
                f"the first one has ended ({str(error).splitlines()[0]})"
            ) from None
