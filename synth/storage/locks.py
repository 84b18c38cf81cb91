"""File locks between all drivers of a run folder, on one machine or several.

A lock ends with its process: the locks of a dead driver are free at once (on a network file system,
when its server notices). So there are no clocks and no heartbeats.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from scorekit.errors import UserError
from scorekit.files import identity_of

#: Seconds between two checks of other processes' locks.
RETRY_S = 0.5


def try_lock(path: Path, *, shared: bool = False) -> IO[str] | None:
    """Return the locked file; None if another process has the lock. Closing it releases the
    lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            raise UserError(
                f"{path}: this file system does not support locks ({error.strerror}). Put "
                "run.out_dir on another one"
            ) from None
        locked = os.fstat(file.fileno())
        if identity_of(path) == (locked.st_dev, locked.st_ino):
            if not shared:
                _sign(file)
            return file
        file.close()  # its previous owner has removed it


def holder(path: Path) -> str:
    """Return the last owner of a lock: "process 12 on host"."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except FileNotFoundError:
        return "another process"


def release(path: Path, file: IO[str]) -> None:
    """Release a lock that is not needed again, and remove its file."""
    path.unlink(missing_ok=True)  # before the release: no process can lock a file without a name
    file.close()


@contextmanager
def hold_locks(
    paths: Iterable[tuple[Path, bool]], doing: str, wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold several locks, each (path, shared).

    wait: called with a line if a lock is not free; None: raise UserError instead."""
    with ExitStack() as stack:
        for path, shared in paths:
            is_announced = False
            while (file := try_lock(path, shared=shared)) is None and wait is not None:
                if not is_announced:
                    wait(f"{path.stem}: waits for {holder(path)}")
                is_announced = True
                time.sleep(RETRY_S)
            if file is None:
                raise UserError(
                    f"{path.stem}: {holder(path)} is working there, so this process cannot "
                    f"{doing}. Wait for it, or stop it"
                )
            stack.enter_context(file)
            if not shared:
                stack.callback(file.truncate, 0)  # remove the name of this process
        yield


class WorkClaims:
    """Hands out shards or files that are neither done nor locked by another process.

    todo: their numbers. done: returns True if a number is done. path: returns the path of its lock.
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


def _sign(file: IO[str]) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
