"""Check that a forked command behaves as one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scorekit.processes import end_with_parent
from testing.servers import PATIENCE_S, alive, wait_until
from tests.kits import forked

PYTHON = sys.executable
#: Codes, and what is special about each.
CODES = {
    "output": "import sys; print('aus', sys.argv); print('한국어', file=sys.stderr)",
    "exit code": "raise SystemExit(3)",
    "exit code above a byte": "raise SystemExit(256 + 7)",
    "exit with a text": "raise SystemExit('no such thing')",
    "exit without a code": "raise SystemExit",
    "failure": "int('x')",
    "ctrl-c": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "input": "import sys; print(sys.stdin.read()[::-1])",
    "open files": "import os; print(len(os.listdir('/proc/self/fd')))",
    "variables": "import os; print(os.environ.get('A'), sorted(os.environ) == list('A'))",
    "folder": "import os, sys; print(os.getcwd(), repr(sys.path[0]))",
    "exit handler": "import atexit; atexit.register(print, 'bye'); print('main')",
    "thread": "import threading as t; t.Timer(0.05, print, ['late']).start(); print('main')",
    "main": "import __main__; print(__name__, __main__.__name__, 'x' in vars(__main__)); x = 1",
    "signals": "import signal as s; print(*[s.getsignal(n) for n in (2, 13, 15, 17)])",
    "child": "import subprocess as s; print(s.run(['false']).returncode)",
}


def outcome(module: Any, words: list[str], **options: Any) -> tuple[int, str, list[str]]:
    """Return the exit code, the output and the last line of the errors."""
    done = module.run([PYTHON, *words], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("name", CODES)
def test_a_forked_code_ends_as_a_started_one(name: str, tmp_path: Path) -> None:
    words = ["-c", CODES[name], "a word", "--flag"]
    options: dict[str, Any] = {"input": "abc ü", "cwd": tmp_path}
    if name == "variables":
        at_start = {key: os.environ[key] for key in os.environ if key.startswith(forked._AT_START)}
        options["env"] = at_start | {"A": "ä"}
    assert outcome(forked, words, **options) == outcome(subprocess, words, **options)


def test_a_forked_module_ends_as_a_started_one(tmp_path: Path) -> None:
    for words in (["json.tool", "nowhere.json"], ["scorekit", "score"], ["scorekit", "--help"]):
        options: dict[str, Any] = {"cwd": forked.ROOT, "env": os.environ | {"COLUMNS": "100"}}
        assert outcome(forked, ["-m", *words], **options) == outcome(
            subprocess, ["-m", *words], **options
        )


@pytest.mark.parametrize("package", forked.LOADED)
def test_all_modules_of_a_package_are_there_and_start_no_thread(package: str) -> None:
    """The server refuses a package with a module that cannot be loaded or starts a thread."""
    module = "services.metricx" if package == "services" else package
    done = forked.run([PYTHON, "-m", module, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    code = f"import sys; print(*sys.modules)  # of {package}"
    loaded = forked.run([PYTHON, "-c", code], capture_output=True, text=True).stdout.split()
    assert set(forked.LOADED[package]) <= set(loaded)


def test_streams_can_be_files_pipes_and_nothing(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    command = [PYTHON, "-c", code]
    with (tmp_path / "log").open("w") as log:
        forked.run(command, stdout=log, stderr=subprocess.STDOUT)
    assert (tmp_path / "log").read_text().split() in (["out", "err"], ["err", "out"])
    done = forked.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", None)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        forked.run(command, capture_output=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_command_gets_the_files_that_are_passed_under_their_numbers() -> None:
    pipes = [os.pipe() for _ in range(3)]
    writers = [writer for _, writer in pipes]
    code = "import os, sys; [os.write(int(fd), fd.encode()) for fd in sys.argv[1:]]"
    try:
        words = [str(writer) for writer in writers]
        assert not forked.run([PYTHON, "-c", code, *words], pass_fds=writers[::-1]).returncode
        assert [os.read(reader, 9).decode() for reader, _ in pipes] == words
    finally:
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)


def test_a_process_that_needs_torch_has_it_loaded() -> None:
    code = "import sys; print({'torch', 'huggingface_hub'} & {*sys.modules})  # synth, scorekit"
    done = forked.run([PYTHON, "-c", code], torch=True, capture_output=True, text=True)
    assert "torch" in done.stdout and "huggingface_hub" in done.stdout
    # So a process of the other server can have HF_HOME and the like.
    assert forked.run([PYTHON, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_running_command_gets_signals() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    with forked.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait() == process.poll() == -signal.SIGINT


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        forked.run([PYTHON, "-c", "import time; time.sleep(600)"], timeout=0.1)
    assert raised.value.timeout == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["sleep", "1"], {}),
        ([PYTHON, "file.py"], {}),
        ([PYTHON, "-c", "pass"], {"preexec_fn": end_with_parent()}),
        ([PYTHON, "-c", "pass"], {"env": {**os.environ, "PYTHONHASHSEED": "1"}}),
        ([PYTHON, "-m", "trainer"], {"env": {**os.environ, "HF_HOME": "/elsewhere"}}),
        ([PYTHON, "-c", "pass"], {"env": {}}),
    ],
    ids=["program", "script", "preexec_fn", "hash seed", "hub", "no variables"],
)
def test_what_no_forked_process_can_have_is_refused(
    command: list[str], options: dict[str, Any]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"can be forked|use subprocess"):
        forked.run(command, capture_output=True, **options)
    assert len(os.listdir("/proc/self/fd")) == before


#: Has a command wait, and tells its process's number; then ends as `END` says.
OWNER = """
import os, sys, time
from tests.kits import forked
if {own_server}:
    forked.start_servers()
forked.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
child = forked.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, os.environ[forked._ADDRESS], flush=True)
{end}
"""


@pytest.mark.parametrize("own_server", [True, False])
@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "raise KeyboardInterrupt"]
)
def test_nothing_is_left_of_a_killed_owner(own_server: bool, end: str) -> None:
    code = OWNER.format(own_server=own_server, end=end)
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, cwd=forked.ROOT, timeout=PATIENCE_S
    )
    pid, address = done.stdout.split()
    wait_until(lambda: not alive(int(pid)))
    if own_server:
        wait_until(lambda: not Path(address).exists())
    else:
        assert Path(address).exists()
