"""End a command with one line and an exit code for an expected error, else with a traceback."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NoReturn

from scorekit.errors import ScorekitError, UserError
from scorekit.report.render import visible

#: Module names that differ from the name of their distribution.
_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
}
_OURS = ("scorekit", "services", "trainer", "synth", "synth_parallel", "deploy", "demo", "bench")
_NAME = re.compile(r"[\w.-]+")


@contextmanager
def clean_exit(go_on: str = "", *, stopped: str = "stopped") -> Iterator[None]:
    """Turn the expected errors of a command into one line and an exit code.

    Raises SystemExit in place of

    - ScorekitError: prints its line, exits with its `exit_code`: 2 if the user can fix it, else 1;
    - OSError (a full disk, a file that may not be read): prints the path and the reason, exits with
      2;
    - ModuleNotFoundError of a package that an extra installs: prints which one, exits with 2;
    - BrokenPipeError because the reader of its output exited (`| head`): prints nothing, exits with
      141;
    - KeyboardInterrupt: prints `stopped`, exits with 130, or with 128 + the `number` that it
      carries.

    go_on: the command that resumes the work; printed if there is work to resume.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None if the command was started without stdout (>&-)
                sys.stdout.flush()  # here, because an error of it can still be reported
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
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at its exit
            sys.exit(128 + signal.SIGPIPE)
        path = error.filename2 or error.filename  # filename2 is the target of a failed rename
        location = f"{path}: " if path else ""
        hint = f"; fix that and resume with: {go_on}" if go_on else ""
        print_line(f"error: {location}{error.strerror or error}{hint}")
        sys.exit(2)
    except KeyboardInterrupt as error:
        print_line(f"{stopped}; resume with: {go_on}" if go_on else stopped)
        sys.exit(128 + getattr(error, "number", signal.SIGINT))


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main, and exit with the code that it returns."""
    with clean_exit():
        sys.exit(main())


def _reader_has_left() -> bool:
    """Return True if the reader of stdout or stderr has left. Other broken pipes are errors."""
    poll = select.poll()
    for handle in (1, 2):
        poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def print_line(line: str) -> None:
    """Print a line on stderr, with the control characters of its content made visible."""
    print(visible(" ".join(line.split())), file=sys.stderr)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a failed import, or None if the module belongs to this project."""
    name = (error.name or "").split(".")[0]
    if not name or name in _OURS:
        return None
    distribution = _DISTRIBUTIONS.get(name, name).lower().replace("_", "-")
    extras = sorted(e for e, names in _packages_of_extras().items() if distribution in names)
    if not extras:
        return f"{distribution} is not installed: pip install {distribution}"
    preferred = [extra for extra in extras if extra in _words_of_command()] or extras
    return f'{distribution} is not installed: `pip install -e ".[{preferred[0]}]"` in the checkout'


def _words_of_command() -> set[str]:
    """Return the name parts of the running module and its command-line arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = spec.name if spec is not None else Path(sys.argv[0]).name.split("_")[0]
    return {*start.split("."), *sys.argv[1:]}


def _packages_of_extras() -> dict[str, set[str]]:
    """Return the distributions that each extra of scorekit installs, by name, except `all`."""
    try:
        lines = requires("scorekit") or []
    except PackageNotFoundError:  # an image copies the code and does not install it
        return {}
    direct: dict[str, set[str]] = {}
    included: dict[str, set[str]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = marker.partition("extra == ")[2].strip(" \"')")
        match = _NAME.match(requirement)
        if not extra or match is None:
            continue
        direct.setdefault(extra, set())
        if match[0] == "scorekit":
            inner = requirement.partition("[")[2].partition("]")[0]
            included.setdefault(extra, set()).update(inner.split(","))
        else:
            direct[extra].add(match[0].lower().replace("_", "-"))
    for _ in included:  # extras may be nested as deep as there are extras
        for extra, included_extras in included.items():
            direct[extra] |= set().union(
                *(direct.get(included_extra, set()) for included_extra in included_extras)
            )
    return {extra: names for extra, names in direct.items() if extra not in ("all", "dev")}
