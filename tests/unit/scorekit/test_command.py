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
    done = subprocess.run(
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
        done = subprocess.run(
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
