"""End a command with one line and an exit code for an expected error, else with a traceback."""

from __future__ import annotations

import errno
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from scorekit.errors import ScorekitError, UserError
from scorekit.extras import missing_package
from scorekit.interrupts import interruptible
from scorekit.report.render import visible
from scorekit.streams import protect_streams, report_lost_lines, result_error, stop_waiting

#: Whether stdout is the result of a command, or says only what happens (see scorekit/streams.py).
StdoutContent = Literal["result", "log"]


@contextmanager
def clean_exit(
    go_on: str = "", *, stopped: str = "stopped", stdout: StdoutContent = "result"
) -> Iterator[None]:
    """Turn the expected errors of a command into one line and an exit code.

    stderr never decides about the command, whatever becomes of its reader or its disk; nor does
    stdout if it is a log. Raises SystemExit in place of

    - ScorekitError: prints its line, exits with its `exit_code`: 2 if the user can fix it, else 1;
    - OSError (a full disk, a file that may not be read): prints the path and the reason, exits with
      2;
    - ModuleNotFoundError of a package that an extra installs: prints which one, exits with 2;
    - BrokenPipeError because the reader of its result exited (`| head`): prints nothing, exits with
      141;
    - KeyboardInterrupt: prints `stopped`, exits with 130, or with 128 + the `number` that it
      carries.

    go_on: the command that resumes the work; printed if there is work to resume.
    stdout: "log" if the result is elsewhere: in files, in a service's answers, in the exit code.
    """
    protect_streams(stdout_is_log=stdout == "log")
    try:
        with (
            _exit_codes(go_on, stopped),
            interruptible(_stopped(go_on, stopped)),
            _written_result(),
        ):
            yield
    finally:
        report_lost_lines()


@contextmanager
def _written_result() -> Iterator[None]:
    """Raise the error of stdout at the end of a command, unless there was another one before."""
    try:
        yield
    except KeyboardInterrupt:
        stop_waiting()
        result_error()  # it is flushed; that it is incomplete is said by the exit code
        raise
    except BaseException as error:
        write_error = result_error()
        if write_error is not None and _exit_code(error) < 128:  # above: a signal ended the command
            raise write_error from None
        raise
    else:
        write_error = result_error()
        if write_error is not None:
            raise write_error


def _exit_code(error: BaseException) -> int:
    """Return the code of SystemExit or typer.Exit; 255 for an error, which is reported first."""
    name = "code" if isinstance(error, SystemExit) else "exit_code"
    code = 255 if isinstance(error, ScorekitError) else getattr(error, name, 255)
    return code if isinstance(code, int) else 0 if code is None else 1


@contextmanager
def _exit_codes(go_on: str, stopped: str) -> Iterator[None]:
    """Turn errors into lines and exit codes, as `clean_exit` says."""
    try:
        yield
    except ScorekitError as error:
        can_resume = go_on and not isinstance(error, UserError) and error.word == "error"
        print_line(
            f"{error.word}: {error}"
            + (f"; finished work is saved; resume with: {go_on}" if can_resume else "")
        )
        for line in error.lines if isinstance(error, UserError) else ():
            print_line(line)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        print_line(f"error: {missing}")
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and (error is result_error() or _reader_has_left()):
            sys.exit(128 + signal.SIGPIPE)
        path = error.filename2 or error.filename  # filename2 is the target of a failed rename
        location = f"{path}: " if path else ""
        hint = f"; fix that and resume with: {go_on}" if go_on else ""
        print_line(f"error: {location}{error.strerror or error}{hint}")
        sys.exit(2)
    except KeyboardInterrupt as error:
        print_line(_stopped(go_on, stopped))
        sys.exit(128 + getattr(error, "number", signal.SIGINT))


def _stopped(go_on: str, stopped: str) -> str:
    return f"{stopped}; resume with: {go_on}" if go_on else stopped


@contextmanager
def clean_imports() -> Iterator[None]:
    """Name a package that is not installed in one line, as `clean_exit`, around imports."""
    with _exit_codes("", "stopped"):
        yield


def run_app(app: Callable[..., Any], **options: Any) -> NoReturn:
    """Run a typer app, and exit with its code.

    It is 141 without a message if the reader of its help has left (`--help | head`): typer and rich
    exit with 1 then. It is 2 with one line if the help is to go to a full disk.
    """
    try:
        app(**options)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print_line(f"error: {error.strerror}")
        sys.stdout = None  # or Python writes again what is buffered, and exits with 120
        sys.exit(2)
    except SystemExit as error:
        if error.code == 1 and isinstance(error.__context__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        raise
    sys.exit(0)


def run_command(main: Callable[[], int | None], *, stdout: StdoutContent = "result") -> NoReturn:
    """Run a script's main, and exit with the code that it returns.

    stdout: as for `clean_exit`.
    """
    with clean_exit(stdout=stdout):
        sys.exit(main())


def _reader_has_left() -> bool:
    """Return True if the reader of stdout has left: it may have been opened as a file, too."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def print_line(line: str) -> None:
    """Print a line on stderr, with the control characters of its content made visible."""
    print(visible(" ".join(line.split())), file=sys.stderr)
