"""Who works at what: file locks that all drivers of a run folder heed, on one machine or several.

A lock goes with its process, however that ends: what a dead driver held is free at once (on a
network file system, when its server has noticed). So no clock is compared and no heartbeat kept.
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

#: Seconds between two looks at what other processes are at.
LOOK_AGAIN_S = 0.5


def try_lock(path: Path, *, shared: bool = False) -> IO[str] | None:
    """The locked file; None where another process holds it (or, for a shared lock, holds it
    alone). Closing it lets go."""
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
                f"{path}: no lock is to be had on this file system ({error.strerror}): put "
                "run.out_dir on another one"
            ) from None
        if _is_still(path, file):
            if not shared:
                _sign(file)
            return file
        file.close()  # who held it before has removed it


def holder(path: Path) -> str:
    """Who said last that he holds it: "process 12 on host"."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except FileNotFoundError:
        return "another process"


def release(path: Path, file: IO[str]) -> None:
    """Let go of a lock that is not needed again, and take its file away."""
    path.unlink(missing_ok=True)  # still held: nobody locks what has no name
    file.close()


@contextmanager
def held(
    paths: Iterable[tuple[Path, bool]], doing: str, wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold several locks, each (path, shared). wait: told who is waited for, where one is not
    free; without it that raises UserError."""
    with ExitStack() as stack:
        for path, shared in paths:
            told = False
            while (file := try_lock(path, shared=shared)) is None and wait is not None:
                if not told:
                    wait(f"{path.stem}: waits for {holder(path)}")
                told = True
                time.sleep(LOOK_AGAIN_S)
            if file is None:
                raise UserError(
                    f"{path.stem}: {holder(path)} is at work there, so that this one cannot "
                    f"{doing}: let it end, or stop it"
                )
            stack.enter_context(file)
            if not shared:
                stack.callback(file.truncate, 0)  # nobody is named who is no longer there
        yield


class Claims:
    """Hands out what is not done and what no other process is at: shards, or files."""

    def __init__(
        self, todo: Iterable[int], done: Callable[[int], bool], path: Callable[[int], Path]
    ) -> None:
        """done: whether a number is done; path: its lock."""
        self.left = list(todo)  # neither done nor handed out
        self._done, self._path = done, path

    def next(self) -> tuple[int, IO[str]] | None:
        """A number with its lock; None where others are at all that is left."""
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
        """Who is at the first of what is left."""
        return holder(self._path(self.left[0]))


def _is_still(path: Path, file: IO[str]) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _sign(file: IO[str]) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
