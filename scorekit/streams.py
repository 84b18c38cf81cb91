"""Streams that never decide about a command: a log that cannot be written loses lines, not the run.

`protect_streams` puts them in place of sys.stdout and sys.stderr, `open_log` opens one for a file.
A log drops what it cannot write (its reader has left, its disk is full, it is closed), counts the
lines, and says their number as soon as it can be written again, else when the command ends. It
waits `MAX_WAIT_S` for a slow reader. After `stop_waiting`, which signal handlers call, all streams
together wait `END_WAIT_S` more.

A stream that is the result of a command (rows on stdout) drops nothing: it waits for its reader
without a limit, and raises an error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

#: Seconds to wait for a reader who reads nothing, for example a pager or a paused terminal. It must
#: be shorter than the time in which a supervisor takes a service for dead.
MAX_WAIT_S = 10.0
#: The same, in total, after a signal that ends the command.
END_WAIT_S = 1.0
#: Seconds after which a waiting write looks whether the command is to end.
_SLICE_S = 0.1
#: A pipe that can be written takes so many bytes at once.
_MAX_BYTES = select.PIPE_BUF
#: Major numbers of terminals that can be opened again: consoles, and those of windows and ssh.
_TERMINALS = (4, *range(136, 144))

_give_up_at = math.inf
_outputs: weakref.WeakSet[Output] = weakref.WeakSet()


class Output(io.RawIOBase):
    """Writes all bytes of a call to a file descriptor, as a log or as a result.

    name: for messages.
    is_log: drop what cannot be written instead of raising OSError.
    error: the last error of a log whose lines are dropped; the first one of a result. What is
    written to a result after that is dropped, because Python would raise the error again at exit.
    lost_lines: the number of dropped lines that are not reported yet.
    report: returns the line that reports them in the log itself.
    """

    def __init__(
        self, fd: int | None, name: str, *, is_log: bool, error: OSError | None = None
    ) -> None:
        """fd: None: there is no file, because of `error`."""
        super().__init__()
        self._fd, self.name, self.is_log, self.error = fd, name, is_log, error
        self.owns_fd = False
        self.lost_lines = 0
        self.report: Callable[[int, str], str] = lost_lines_text
        self._is_stuck = False  # the last write was given up
        self._is_torn = False  # only a part of the last line was written
        self._lock = threading.RLock()  # of lines that take several writes
        _outputs.add(self)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor. Raises OSError if there is none."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._fd is not None and os.isatty(self._fd)

    def close(self) -> None:
        """Close the descriptor if it was opened for this object."""
        if self.owns_fd and self._fd is not None:
            with contextlib.suppress(OSError):  # of a network's disk
                os.close(self._fd)
            self._fd = None
        super().close()

    def write(self, data: Any, /) -> int:
        """Write, wait or drop as the class says, and return the number of bytes in `data`."""
        content = bytes(data)
        with self._lock:
            if not self.is_log and self.error is not None:
                return len(content)
            done = 0
            try:
                if self.lost_lines or self._is_torn:
                    self._report_lost_lines()
                while done < len(content):
                    done += self._write_some(content[done:])
            except OSError as error:
                self.error = error
                if not self.is_log:
                    raise
                self.lost_lines += content.count(b"\n", done)
                self._is_torn |= done > 0 and content[done - 1 : done] != b"\n"
            except KeyboardInterrupt:
                stop_waiting()
                raise
        return len(content)

    def renew_lock(self) -> None:
        """Forget a lock that another thread held when this process was forked."""
        self._lock = threading.RLock()

    @property
    def reason(self) -> str:
        """Return why lines are dropped."""
        return (self.error and self.error.strerror) or str(self.error)

    def _report_lost_lines(self) -> None:
        line = "\n" if self._is_torn else ""
        if self.lost_lines:
            line += self.report(self.lost_lines, self.reason) + "\n"
        content = line.encode("utf-8", "backslashreplace")
        while content:
            content = content[self._write_some(content) :]
        self.lost_lines, self._is_torn = 0, False

    def _write_some(self, content: bytes) -> int:
        """Write the beginning of `content`. Raises OSError, TimeoutError if its reader is stuck."""
        if self._fd is None:
            assert self.error is not None
            raise self.error
        wait_s = 0.0 if self._is_stuck else MAX_WAIT_S if self.is_log else math.inf
        deadline = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(BlockingIOError):
                written = write_some_now(self._fd, content)
                self._is_stuck = False
                return written
            remaining = min(deadline, _give_up_at) - time.monotonic()
            if remaining <= 0:
                self._is_stuck = True
                raise TimeoutError(errno.ETIMEDOUT, "its reader does not read")
            _wait_for_room(self._fd, min(remaining, _SLICE_S))


class _StandardStream(io.TextIOWrapper):
    """A text stream that stays open, because others would then fail to write to it."""

    def close(self) -> None:
        """Flush only."""
        self.flush()


def protect_streams(*, stdout_is_log: bool) -> None:
    """Replace the process's own sys.stdout and sys.stderr, by whatever state they are in.

    stdout_is_log: whether stdout is a log, too, or the result of the command. A later call may
    change it. A stream that was put there by somebody else (a test, a notebook) stays.
    """
    for fd in range(3):  # or the next file that is opened would be written to as stdout or stderr
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # as those of any process
    for name, is_log in (("stderr", True), ("stdout", stdout_is_log)):
        stream = _protect(getattr(sys, name), name, is_log=is_log)
        setattr(sys, name, stream)
        if isinstance(stream, _StandardStream):
            setattr(sys, f"__{name}__", stream)


def open_log(path: Path) -> io.TextIOWrapper:
    """Open a log file to append to. It never raises OSError: lines are dropped as the module says.

    Not for files that are read again as data.
    """
    try:
        output = Output(
            os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666),
            str(path),
            is_log=True,
        )
        output.owns_fd = True
    except OSError as error:
        output = Output(None, str(path), is_log=True, error=error)
    return io.TextIOWrapper(  # without a buffer between them, as for `python -u`
        output,
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def stop_waiting() -> None:
    """Wait for slow readers `END_WAIT_S` more, in total: the command is to end.

    It takes no lock and writes nothing, so a signal handler may call it.
    """
    global _give_up_at
    _give_up_at = min(_give_up_at, time.monotonic() + END_WAIT_S)


def write_at_once(text: str) -> None:
    """Write a short text to stderr, or drop it if it would have to wait. For signal handlers.

    A handler must neither wait for a reader nor use sys.stderr, which it may have interrupted.
    """
    with contextlib.suppress(OSError):
        write_some_now(2, text.encode())


def write_some_now(fd: int, content: bytes) -> int:
    """Write what can be written without waiting, and return the number of bytes.

    Raises BlockingIOError if nothing can be written now, other OSErrors as os.write does. The
    descriptor stays blocking: other processes share it.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return os.write(fd, content)
    content = content[:_MAX_BYTES]
    is_terminal = stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in _TERMINALS
    if stat.S_ISFIFO(status.st_mode) or is_terminal:
        # A description of its own: another process may fill a pipe meanwhile, and a terminal that
        # has room for a byte would wait for the room of all.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        try:
            separate_fd = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:  # no /proc, or a named pipe without a reader
            pass
        else:
            try:
                return os.write(separate_fd, content)
            finally:
                os.close(separate_fd)
    if not _wait_for_room(fd, 0.0):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return os.write(fd, content)


def lost_lines_text(count: int, reason: str) -> str:
    """Return the line that reports lost lines."""
    return f"lines that were not written: {count:,} ({reason})"


def set_report(report: Callable[[int, str], str]) -> None:
    """Report lost lines of stderr in the format of its log: by a function of (count, reason)."""
    output = _output_of(sys.stderr)
    if output is not None:
        output.report = report


def lost_lines() -> list[str]:
    """Return a line for each log that has dropped lines which it did not report."""
    return [
        f"{output.name}: {lost_lines_text(output.lost_lines, output.reason)}"
        for output in sorted(_outputs, key=lambda output: output.name)
        if output.is_log and output.lost_lines
    ]


def report_lost_lines() -> None:
    """Print what logs have dropped, at the end of a command, on a log that can be written."""
    lines = lost_lines()
    for stream in (sys.stderr, sys.stdout):
        output = _output_of(stream)
        if lines and output is not None and output.is_log and not output.lost_lines:
            print(*(f"warning: {line}" for line in lines), sep="\n", file=stream, flush=True)
            return


def result_error() -> OSError | None:
    """Flush stdout; return the error for which it could not be written, if it is a result."""
    stream = sys.stdout
    if stream is None:  # the command was started without stdout (>&-)
        return None
    try:
        stream.flush()
    except OSError as error:
        return error
    output = _output_of(stream)
    return None if output is None or output.is_log else output.error


def _protect(stream: TextIO | None, name: str, *, is_log: bool) -> TextIO | None:
    fd = {"stdout": 1, "stderr": 2}[name]
    output = _output_of(stream)
    if output is None:
        if stream is None:
            if not is_log:
                return None
        elif type(stream) is not io.TextIOWrapper or not _has_fd(stream, fd):
            return stream
        else:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        output = Output(fd, name, is_log=is_log)
        # A buffer for stdout, as it may be millions of rows. None for stderr: while a buffer is
        # written, a signal handler that writes, too, gets a RuntimeError.
        is_unbuffered = fd == 2 or (stream is not None and stream.write_through)  # python -u
        stream = _StandardStream(
            output if is_unbuffered else io.BufferedWriter(output),
            encoding=stream.encoding if stream is not None else "utf-8",
            errors=stream.errors if stream is not None else "backslashreplace",
            line_buffering=stream.line_buffering if stream is not None else True,
            write_through=stream.write_through if stream is not None else False,
        )
        stream.mode = "w"  # type: ignore[misc]
    output.is_log = is_log
    if is_log:
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    return stream


def _output_of(stream: Any) -> Output | None:
    """Return the part of a protected stream that writes; None: it is not protected."""
    if not isinstance(stream, _StandardStream):
        return None
    buffer: Any = stream.buffer
    output = buffer.raw if isinstance(buffer, io.BufferedWriter) else buffer
    return output if isinstance(output, Output) else None


def _has_fd(stream: TextIO, fd: int) -> bool:
    try:
        return stream.fileno() == fd
    except (OSError, ValueError):
        return False


def _wait_for_room(fd: int, seconds: float) -> bool:
    """Return whether a write would not wait, after `seconds` at most; an error counts as room."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _renew_locks() -> None:
    for output in _outputs:
        output.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
