"""Check the command `scorekit`: it names all commands, and each is the one that a module has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scorekit import __version__
from scorekit.__main__ import ADAPTERS, COMMANDS, SERVICES, app
from scorekit.lazy_commands import Entry, lazy_group
from testing.servers import free_port, wait_until
from tests.kits.service_process import is_up

RUNNER = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})
#: Commands of a module, before the words that `scorekit` and the module share.
MODULES = {
    "score": "scorekit.__main__",
    "meta-eval": "scorekit.__main__",
    "show": "scorekit.__main__",
    "compare": "scorekit.__main__",
    "init": "scorekit.__main__",
    "roleplay": "trainer.__main__",
    "search": "trainer.__main__",
    **{
        name: entry.target.partition(":")[0]
        for name, entry in COMMANDS.items()
        if " " in entry.target
    },
}


def helped(group: typer.Typer, *words: str) -> list[str]:
    """Return the lines of a command's help without the line that has its name."""
    result = RUNNER.invoke(group, [*words, "--help"])
    assert result.exit_code == 0, result.output
    return [line for line in result.output.splitlines() if "Usage:" not in line]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_the_help_of_its_module(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(import_module(module), attribute.partition(" ")[0])
    if not isinstance(target, typer.Typer):
        target = import_module(MODULES[name]).app
    words = [name] if target is app or " " in attribute else []
    assert helped(app, name) == helped(target, *words)


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_adapter_has_the_help_of_its_module(name: str) -> None:
    module, _, attribute = ADAPTERS[name].target.partition(":")
    assert helped(app, "adapter", name) == helped(getattr(import_module(module), attribute))


@pytest.mark.parametrize("name", SERVICES)
def test_the_help_of_each_service_has_the_name_of_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RUNNER.invoke(app, ["serve", name, "--help"], prog_name="scorekit")
    assert result.exit_code == 0
    assert result.output.startswith(f"usage: scorekit serve {name} [-h] [--host str]")


def test_the_help_names_all_commands_and_imports_none() -> None:
    code = (
        "import sys; from scorekit.__main__ import app\n"
        "try: app(['--help'], prog_name='scorekit')\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    for name in (*COMMANDS, "serve", "adapter", "fetch"):
        assert f"│ {name} " in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"trainer", "services", "synth", "torch", "fastapi", "httpx", "numpy"}


def test_the_version_is_told_with_the_commit() -> None:
    assert RUNNER.invoke(app, ["--version"]).output.startswith(f"scorekit {__version__} (")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_help_on_a_full_disk_is_an_error_of_one_line(option: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "scorekit", option]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["scor"], "No such command 'scor'. Did you mean 'score'"),
        (["serve", "metrics"], "No such command 'metrics'. Did you mean 'metricx'?"),
        (["serve", "judge", "--prot", "1"], "error: unrecognized arguments: --prot 1 (did you"),
        (["serve", "judge", "--port", "x"], "error: --port (JUDGE_PORT): Input should be a valid"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], line: str) -> None:
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2
    assert line in result.output


def test_a_package_that_is_missing_is_named_when_its_command_is_called() -> None:
    group = typer.Typer(cls=lazy_group({"x": Entry("no_such_module.x:app", "Do it.")}))
    group.callback()(lambda: None)
    assert "Do it." in RUNNER.invoke(group, ["--help"]).output
    result = RUNNER.invoke(group, ["x"])
    assert result.exit_code == 2
    assert "no-such-module is not installed: pip install no-such-module" in result.output


def test_words_are_completed_also_those_of_a_command() -> None:
    def completed(words: str) -> list[str]:
        variables = {
            "_SCOREKIT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        code = "from scorekit.__main__ import app; app(prog_name='scorekit')"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        return done.stdout.split()

    assert completed("scorekit se") == ["search", "serve"]
    assert completed("scorekit serve me") == ["metricx"]
    assert completed("scorekit train --res") == ["--resume"]


def test_a_function_of_the_folder_is_found_and_no_package_of_ours_is_hidden(
    tmp_path: Path,
) -> None:
    (tmp_path / "services.py").write_text("raise SystemExit('a package of the user')")
    (tmp_path / "mine.py").write_text("no_function = 1")
    arguments = "ingest", ".", "--index", "index", "--ocr", "mine:no_function"
    code = "from scorekit.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "--ocr mine:no_function: not a function" in done.stderr


def test_a_service_runs_until_a_signal_ends_it() -> None:
    port = free_port()
    words = ["serve", "judge", "--backend", "rules", "--cache", "memory", "--port", str(port)]
    command = [sys.executable, "-m", "scorekit", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_up(f"http://127.0.0.1:{port}"))
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, log
