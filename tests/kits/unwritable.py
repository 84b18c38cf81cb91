"""Streams that cannot be written, and a command in a pipeline that a terminal interrupts."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scorekit.processes import end_with_parent
from testing.servers import PATIENCE_S, wait_until


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    """Yield a pipe's end for writing; its reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextmanager
def unread_pipe() -> Iterator[int]:
    """Yield a pipe's end for writing; the pipe is full, and nobody reads it."""
    reader, writer = os.pipe()
    try:
        fill(writer)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def full_device() -> Iterator[int]:
    """Yield a file on a full disk."""
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        yield file
    finally:
        os.close(file)


Unwritable = Callable[[], contextlib.AbstractContextManager[int]]
BY_NAME: dict[str, Unwritable] = {
    "without a reader": pipe_without_reader,
    "not read": unread_pipe,
    "on a full disk": full_device,
}


class NamedPipe:
    """A pipe that another process opens by its path to write, and whose reader may leave.

    Use it as a context manager.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        # Its own end for writing, too: a reader without any writer reads the end of the file.
        self._ends = [os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)]

    def __enter__(self) -> NamedPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: who writes gets EPIPE."""
        while self._ends:
            os.close(self._ends.pop())

    def fill(self) -> None:
        """Make it full: who writes waits."""
        fill(self._ends[1])


def fill(writer: int) -> None:
    """Write to a pipe until it takes nothing more."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"-" * 4096):
            pass
    os.set_blocking(writer, True)


class Pipeline:
    """`COMMAND 2>&1 | tee LOG` in a process group of its own, as a shell starts it.

    Use it as a context manager: its end kills what still runs.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start it.

        folder: for the log and the exit code.
        """
        self.log, self._code = folder / "tee.log", folder / "exit_code"
        words = shlex.join(command)
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'{{ {words}; echo $? > "$0"; }} 2>&1 | tee "$1" > /dev/null',
                str(self._code),
                str(self.log),
            ],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    @property
    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self._code.exists() and self._code.read_text() != ""

    def interrupt(self) -> int:
        """Press Ctrl-C, which reaches command and tee, and return the exit code of the command."""
        os.killpg(self._process.pid, signal.SIGINT)
        wait_until(lambda: self.has_ended)
        return int(self._code.read_text())
