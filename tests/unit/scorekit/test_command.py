"""Check that every command ends known errors with one line and an exit code."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits import forked
from tests.kits.unwritable import (
    BY_NAME,
    Unwritable,
    full_device,
    pipe_without_reader,
    unread_pipe,
)

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "scorekit",
    "services",
    "trainer",
    "synth",
    "synth_parallel",
    "demo",
    "bench",
    "evidence",
    "testing",
    "tools",
    "deploy",
)
#: Files that run but do not use the handler, with the reason.
EXCEPTIONS_WITH_REASON = {
    "deploy/smoke.py": "runs without the project",
    "deploy/docker/requirements.py": "runs without the project",
    "bench/generator_images/read_text.py": "runs in an environment without the project",
    "tools/check_imports.py": "says what is missing, so it imports nothing",
    "scorekit/server/fake.py": "a service for tests and benches",
    "synth_parallel/cli.py": "synth's command",
    "services/retriever/index/worker.py": "a process of ingest, which tells how it ended",
}


def is_run(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body
    )


def commands(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the commands of a typer application."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            ".command(" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def calls(node: ast.AST) -> set[str]:
    functions = (
        descendant.func for descendant in ast.walk(node) if isinstance(descendant, ast.Call)
    )
    return {ast.unparse(func).removeprefix("_").rpartition(".")[2] for func in functions}


def ends_cleanly(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = list(commands(tree))
    if typed:
        return all("clean_exit" in calls(node) for node in typed)
    if "bench.common" in ast.unparse(tree) and "run" in calls(tree):
        return True  # bench.common.run uses it
    if "run_seeds" in calls(tree):
        return True  # evidence.loop.rounds.run_seeds uses it
    return bool(calls(tree) & {"clean_exit", "run_command"})


def test_every_command_ends_through_the_one_handler() -> None:
    run = {
        str(path.relative_to(ROOT)): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__name__" in (text := path.read_text(encoding="utf-8")) and is_run(ast.parse(text))
    }
    assert EXCEPTIONS_WITH_REASON.keys() < run.keys() and len(run) > 50
    exceptions = {name for name, path in run.items() if not ends_cleanly(path)}
    assert exceptions == EXCEPTIONS_WITH_REASON.keys()


SCRIPT = """
import os, signal, sys
from scorekit.command import run_command
from scorekit.errors import ScorekitError, UserError

def main():
    {what}

run_command(main)
"""


def run_statement(statement: str) -> tuple[int, str, str]:
    done = forked.run(
        [sys.executable, "-c", SCRIPT.format(what=statement)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("statement", "code", "line"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise UserError('x: mend it')", 2, "error: x: mend it\n"),
        ("open('/nowhere/x')", 2, "error: /nowhere/x: No such file or directory\n"),
        ("raise OSError(28, 'No space left on device')", 2, "error: No space left on device\n"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "stopped\n"),
        # For example of a socket: the output is still read.
        ("raise BrokenPipeError(32, 'Broken pipe')", 2, "error: Broken pipe\n"),
    ],
)
def test_what_is_understood_is_one_line_and_a_code(statement: str, code: int, line: str) -> None:
    assert run_statement(statement) == (code, "", line)


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    code, _, stderr = run_statement("raise KeyError('x')")
    assert code == 1 and "Traceback" in stderr and stderr.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_who_has_seen_enough_is_told_nothing(lines: int) -> None:
    """Check output that fits the buffer, too, which is written when the command ends."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = forked.run(
            [sys.executable, "-c", SCRIPT.format(what=f"print('line\\n' * {lines})")],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_command_that_has_no_output_ends_as_any() -> None:
    code = SCRIPT.format(what="raise UserError('x: mend it')")
    closed = ["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "error: x: mend it\n")


def run_with(
    statement: str,
    arguments: str = "",
    *,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    env: dict[str, str] | None = None,
) -> tuple[int, str, str]:
    """Run a statement as a command, `run_command(main, ARGUMENTS)`, with these streams."""
    script = SCRIPT.format(what=statement).replace("(main)", f"(main, {arguments})")
    # The encoding of the streams is decided when Python starts.
    starts = subprocess if "PYTHONIOENCODING" in (env or {}) else forked
    done = starts.run(
        [sys.executable, "-c", script],
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=os.environ | (env or {}),
        timeout=60,
    )
    return done.returncode, done.stdout or "", done.stderr or ""


LOG = "stdout='log'"
#: Prints in every way that libraries do, also from a thread, and closes a stream.
PRINTS = (
    "import logging, threading, warnings; from rich.console import Console; "
    "logging.basicConfig(); logging.error('logged'); warnings.warn('warned'); "
    "print('printed' * 9000, file=sys.stderr, flush=True); Console(stderr=True).print('rich'); "
    "t = threading.Thread(target=lambda: [print(i, file=sys.stderr) for i in range(99)] + "
    "[done.append(1)]); done = []; t.start(); t.join(); sys.stderr.close(); "
    "print('printed', file=sys.stderr); "
)


@pytest.mark.parametrize("unwritable", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("return 0 if done else 7", 0),
        ("raise UserError('x: mend it')", 2),
        ("os.kill(os.getpid(), signal.SIGINT)", 130),
    ],
)
def test_stderr_decides_about_no_exit_code(
    unwritable: Unwritable, statement: str, code: int
) -> None:
    quick = "import scorekit.streams as s; s.MAX_WAIT_S = s.END_WAIT_S = 0.0; "
    with unwritable() as stream:
        assert run_with(quick + PRINTS + statement, stderr=stream) == (code, "", "")
        both = run_with(
            quick + PRINTS + "print(1); " + statement, LOG, stdout=stream, stderr=stream
        )
    assert both == (code, "", "")


def test_a_closed_stderr_is_no_other_file(tmp_path: Path) -> None:
    """Check that a file that is opened next is not written to as stderr."""
    code = SCRIPT.format(
        what=f"file = open({str(tmp_path / 'data')!r}, 'w'); "
        "print('a warning', file=sys.stderr); os.write(2, b'a signal'); file.write('row')"
    )
    closed = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    done = subprocess.run(closed, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "data").read_text() == "row"


@pytest.mark.parametrize("end", ["", "; return 0", "; sys.exit(0)", "; raise typer.Exit(0)"])
def test_a_result_on_a_full_disk_is_an_error(end: str) -> None:
    statement = f"import typer; print('row'){end}"
    with full_device() as stream:
        code, _, stderr = run_with(statement, stdout=stream)
    assert (code, stderr) == (2, "error: No space left on device\n")


def test_a_result_that_a_library_lost_is_an_error() -> None:
    """Check rich, which ends the process with exit code 1 if the reader has left."""
    statement = "from rich.console import Console; Console().print('row')"
    with pipe_without_reader() as stream:
        assert run_with(statement, stdout=stream) == (128 + signal.SIGPIPE, "", "")
    swallowed = "import contextlib\n    with contextlib.suppress(OSError): print('row', flush=True)"
    with full_device() as stream:
        assert run_with(swallowed, stdout=stream)[0] == 2


def test_a_log_on_a_full_disk_is_told_on_stderr() -> None:
    with full_device() as stream:
        code, _, stderr = run_with("print('a line\\n' * 5)", LOG, stdout=stream)
    warning = "warning: stdout: lines that were not written: 6 (No space left on device)\n"
    assert (code, stderr) == (0, warning)


def test_stderr_on_a_full_disk_is_told_on_stdout_only_if_that_is_a_log() -> None:
    statement = "print('a line', file=sys.stderr)"
    with full_device() as stream:
        code, stdout, _ = run_with(statement, LOG, stderr=stream)
        warning = "warning: stderr: lines that were not written: 1 (No space left on device)\n"
        assert (code, stdout) == (0, warning)
        assert run_with(statement, stderr=stream) == (0, "", "")


@pytest.mark.parametrize("arguments", ["", LOG])
def test_unbuffered_output_stays_so(arguments: str) -> None:
    statement = "print('half', end=''); os._exit(0)"
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    assert run_with(statement, arguments, env=unbuffered) == (0, "half", "")
    assert run_with(statement, arguments, env={"PYTHONUNBUFFERED": ""}) == (0, "", "")


def test_a_log_takes_every_character() -> None:
    narrow = {"PYTHONIOENCODING": "ascii"}
    assert run_with("print('번역')", LOG, env=narrow) == (0, "\\ubc88\\uc5ed\n", "")


@pytest.mark.parametrize("arguments", ["", LOG])
def test_an_interrupted_command_waits_for_no_reader(arguments: str) -> None:
    """Check a command that waits for its reader when Ctrl-C comes."""
    statement = (
        "import scorekit.streams as s, threading; s.END_WAIT_S = 0.0; s.MAX_WAIT_S = 1000.0; "
        "wait = s._wait_for_room; "
        "s._wait_for_room = lambda *a: signal.raise_signal(signal.SIGINT) or wait(*a); "
        "print('line\\n' * 10_000)"
    )
    with unread_pipe() as stream:
        code, _, stderr = run_with(statement, arguments, stdout=stream)
    assert code == 130 and stderr.startswith("stopped\n") and "Traceback" not in stderr
