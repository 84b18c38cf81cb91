"""File locks between processes, on one machine or several.

A lock ends with its process: the locks of a dead process are free at once (on a network file
system, when its server notices). So there are no clocks and no heartbeats.
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
                "the folder on another one"
            ) from None
        locked = os.fstat(file.fileno())
        if identity_of(path) == (locked.st_dev, locked.st_ino):
            if not shared:
                _sign(file)
            return file
        file.close()  # its previous owner has removed it


def is_locked(path: Path) -> bool:
    """Return whether a process has the lock."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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


def _sign(file: IO[str]) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
