"""How a command ends: one line and an exit code for what is understood, else a traceback."""

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

#: Where a module's name is not its distribution's.
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
_OURS = ("scorekit", "services", "trainer", "synth", "synth_parallel", "deploy", "demo", "bench")
_NAME = re.compile(r"[\w.-]+")


@contextmanager
def clean_exit(go_on: str = "", *, stopped: str = "stopped") -> Iterator[None]:
    """Around a command. Raises SystemExit in place of

    - ScorekitError: its line and its `exit_code`: 2 where the user can mend it, else 1;
    - OSError (a full disk, a file that may not be read): where and why, 2;
    - ModuleNotFoundError of a package that an extra installs: which one, 2;
    - a reader of its output who left (`| head`): nothing, 141;
    - KeyboardInterrupt: `stopped`, and 130, or 128 + the `number` of the signal that it carries.

    go_on: the command that goes on with what is done, said where there is something done.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is None where the command began without one (>&-)
                sys.stdout.flush()  # while there is somebody to say that it failed
    except ScorekitError as error:
        kept = go_on and not isinstance(error, UserError) and error.word == "error"
        say(f"{error.word}: {error}" + (f"; what is done is kept: {go_on}" if kept else ""))
        for line in error.lines if isinstance(error, UserError) else ():
            say(line)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        say(f"error: {missing}")
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python flushes at its end
            sys.exit(128 + signal.SIGPIPE)
        place = error.filename2 or error.filename  # the second: what a file was to be renamed to
        where = f"{place}: " if place else ""
        mended = f"; mend that, and go on with: {go_on}" if go_on else ""
        say(f"error: {where}{error.strerror or error}{mended}")
        sys.exit(2)
    except KeyboardInterrupt as error:
        say(f"{stopped}; go on with: {go_on}" if go_on else stopped)
        sys.exit(128 + getattr(error, "number", signal.SIGINT))


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main, and exit with what it gives."""
    with clean_exit():
        sys.exit(main())


def _reader_has_left() -> bool:
    """Of stdout or stderr: another pipe that broke is told as any fault."""
    poll = select.poll()
    for handle in (1, 2):
        poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def say(line: str) -> None:
    """A line on stderr. What a service said in it is shown, never obeyed."""
    print(visible(" ".join(line.split())), file=sys.stderr)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for an import that failed; None where the module is one of ours."""
    name = (error.name or "").split(".")[0]
    if not name or name in _OURS:
        return None
    distribution = _DISTRIBUTIONS.get(name, name).lower().replace("_", "-")
    extras = sorted(e for e, names in _packages_of_extras().items() if distribution in names)
    if not extras:
        return f"{distribution} is not installed: pip install {distribution}"
    wanted = [extra for extra in extras if extra in _words_of_command()] or extras
    return f'{distribution} is not installed: `pip install -e ".[{wanted[0]}]"` in the checkout'


def _words_of_command() -> set[str]:
    """Return the parts of the module that runs and the words behind it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = spec.name if spec is not None else Path(sys.argv[0]).name.split("_")[0]
    return {*start.split("."), *sys.argv[1:]}


def _packages_of_extras() -> dict[str, set[str]]:
    """Return the distributions that each extra of scorekit installs, by name, but for `all`."""
    try:
        lines = requires("scorekit") or []
    except PackageNotFoundError:  # the code of an image, which is copied there
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
    for _ in included:  # an extra within an extra within an extra
        for extra, parts in included.items():
            direct[extra] |= set().union(*(direct.get(part, set()) for part in parts))
    return {extra: names for extra, names in direct.items() if extra not in ("all", "dev")}
