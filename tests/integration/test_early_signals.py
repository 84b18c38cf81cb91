"""Check that a signal in a command's first second ends it without a traceback.

The command stops at an import, by a hook, so the moment does not depend on the machine's speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits import forked

ROOT = Path(__file__).parents[2]
#: Waits for a signal at the import of a module. A KeyboardInterrupt is lost there, as some packages
#: lose it: a command that relies on it would go on.
HOOK = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"]:
            sys.meta_path.remove(self)
            try:
                os.write(2, b"stopped at the import\\n")
                signal.pause()
            except BaseException as error:
                os.write(2, f"the package loses {type(error).__name__}\\n".encode())

if "STOP_AT" in os.environ:
    sys.meta_path.insert(0, Stop())
"""
#: The same within a package, while it is imported.
PACKAGE = (
    f'import os, sys, signal\nos.environ["STOP_AT"] = "now"\n{HOOK}\nStop().find_spec("now")\n'
)
PACKAGE = PACKAGE.replace("sys.meta_path.remove(self)", "pass")

EARLY = [  # a command, and what it imports early
    (["-m", "trainer", "check", "--config", "my.yaml"], "typer"),
    (["-m", "trainer", "check", "--config", "my.yaml"], "trainer.tasks"),
    (["-m", "trainer.roleplay", "--help"], "yaml"),
    (["-m", "synth", "status", "--config", "my.yaml"], "typer"),
    (["-m", "synth", "status", "--config", "my.yaml"], "scorekit.processes"),
    (["-m", "synth_parallel.cli", "status", "--config", "my.yaml"], "synth.__main__"),
    (["-m", "scorekit", "score", "in.jsonl", "out.jsonl"], "typer"),
    (["-m", "scorekit", "meta-eval", "in.jsonl", "out"], "scorekit.metaeval.command"),
    (["-m", "services.metricx"], "scorekit.server.run"),
    (["-m", "services.xcomet"], "uvicorn"),
    (["-m", "services.judge"], "structlog"),
    (["-m", "services.embedder"], "scorekit.command"),
    (["-m", "services.retriever"], "services.retriever.model"),
    (["-m", "services.retriever", "ingest"], "services.retriever.command"),
    (["-m", "scorekit.adapters.gemmax"], "typer"),
    (["-m", "scorekit.adapters.openrlhf"], "typer"),
    (["-m", "demo"], "typer"),
    (["-m", "demo.synth"], "rich"),
]


def _end(tmp_path: Path, arguments: list[str], number: int, **environment: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command that gets a signal when it is stopped."""
    (tmp_path / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or lines[-1] not in ("", "stopped at the import\n"):
            lines.append(process.stderr.readline())
        assert lines[-1], lines
        process.send_signal(number)
        tail = process.stderr.read()
    return process.returncode, tail


@pytest.mark.parametrize(("arguments", "module"), EARLY)
def test_ctrl_c_during_the_imports_of_a_command_ends_it(arguments, module, tmp_path):
    assert _end(tmp_path, arguments, signal.SIGINT, STOP_AT=module) == (130, "stopped\n")


@pytest.mark.parametrize(
    ("arguments", "module"), [EARLY[0], ([*EARLY[8][0], "--no-auth"], "fastapi")]
)
def test_sigterm_during_the_imports_of_a_command_ends_it(arguments, module, tmp_path):
    assert _end(tmp_path, arguments, signal.SIGTERM, STOP_AT=module) == (143, "stopped\n")


SCRIPT = """
from scorekit.interrupts import end_at_once
end_at_once()
import os, subprocess, sys
from scorekit.command import clean_exit
with clean_exit(stopped="stopped (go on with --resume)"):
    child = subprocess.Popen(["sleep", "60"]) if "child" in sys.argv else None
    try:
        import torch
        print("the command goes on", file=sys.stderr)
        os.kill(os.getpid(), 2)
    finally:
        print("cleaned up", file=sys.stderr)
        if child is not None:
            child.kill()
            child.wait()
"""


def _with_slow_package(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(PACKAGE, encoding="utf-8")
    return _end(tmp_path, ["-c", SCRIPT, *arguments], signal.SIGINT)


def test_ctrl_c_while_a_command_imports_torch_ends_it(tmp_path):
    assert _with_slow_package(tmp_path) == (130, "stopped (go on with --resume)\n")


def test_ctrl_c_while_a_command_with_processes_imports_torch_lets_it_end_them(tmp_path):
    code, lines = _with_slow_package(tmp_path, "child")
    assert code == 130
    assert lines.splitlines() == [
        "the package loses KeyboardInterrupt",
        "the command goes on",
        "cleaned up",
        "stopped (go on with --resume)",
    ]


def test_ctrl_c_raises_keyboard_interrupt_in_the_command_and_nothing_is_left_after_it(tmp_path):
    script = """
from scorekit.interrupts import end_at_once
end_at_once()
import os, signal, sys
from scorekit.command import clean_exit
before = signal.getsignal(2), list(sys.meta_path)
try:
    with clean_exit():
        assert signal.getsignal(2) is signal.default_int_handler  # as asyncio.run wants it
        import torch
        assert torch.__spec__.loader is torch.__loader__, torch.__spec__
        assert type(torch.__loader__).__module__.startswith("_frozen_importlib"), torch.__loader__
        assert signal.getsignal(2) is signal.default_int_handler
        if os.fork() == 0:
            os._exit(signal.getsignal(15) is not signal.SIG_DFL)
        assert os.wait()[1] == 0
        os.kill(os.getpid(), 2)
except SystemExit as error:
    assert (signal.getsignal(2), sys.meta_path) == before
    print(error.code)
"""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("130\n", "stopped\n")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    """Check `command &` of a script, whose shell ignores Ctrl-C for it."""
    script = (
        "import signal; from scorekit.interrupts import end_at_once; end_at_once();"
        "print(signal.getsignal(2) is signal.SIG_IGN)"
    )
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "--", sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    "module",
    [
        "trainer",
        "scorekit",
        "synth",
        "synth_parallel.cli",
        "scorekit.adapters.gemmax",
        "scorekit.adapters.openrlhf",
        "demo",
    ],
)
def test_help_whose_reader_has_left_ends_with_141_and_says_nothing(module):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = forked.run(
            [sys.executable, "-m", module, "--help"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


RUN = """
import runpy, signal, sys
sys.argv = ["scorekit", "--help"]
try:
    runpy.run_module("scorekit", run_name="__main__")
except SystemExit:
    print(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGTERM))
"""


@pytest.mark.parametrize("first", ["builtins.__IPYTHON__ = True", "sys.ps1 = '>>> '"])
def test_a_command_that_runs_within_a_prompt_leaves_its_signals_alone(first, tmp_path):
    """Check it as `%run -m scorekit` does it: else Ctrl-C would end the notebook later."""
    done = subprocess.run(
        [sys.executable, "-c", f"import builtins, sys\n{first}\n{RUN}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "default_int_handler 0", done.stderr
