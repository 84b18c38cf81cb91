"""Check the one-line error that names a missing package and the extra that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scorekit.extras import missing_package

RUN = (
    "import runpy, sys; sys.modules[{package!r}] = None; sys.argv = {words!r}; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("services.metricx --port 0", "structlog", "metricx"),
        ("services.judge --port 0", "fastapi", "judge"),
        ("services.retriever ingest a --index b", "numpy", "retriever"),
        ("synth status --config x", "langcodes", "synth"),
        ("trainer train --config configs/translation/demo.yaml", "torch", "trainer"),
        ("scorekit fetch", "huggingface_hub", "metricx"),
    ],
)
def test_a_command_names_the_extra_that_it_misses(command, package, extra):
    module, *words = command.split()
    code = RUN.format(package=package, module=module, words=[module, *words])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    name = package.replace("_", "-")
    line = f'error: {name} is not installed: `pip install -e ".[{extra}]"` in the checkout'
    assert done.stderr.splitlines() == [line]


def test_the_help_of_every_command_needs_no_extra():
    code = """
import sys, tomllib
from pathlib import Path
from click import Group
from typer.main import get_command
extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
listed = (requirement for extra in extras.values() for requirement in extra)
names = {"PIL", "faiss", *(text.split(">")[0].split("[")[0] for text in listed)}
sys.modules |= {n.replace("-", "_"): None for n in names - {"scorekit"}}
from scorekit.__main__ import app
from scorekit.lazy_commands import LazyCommand

def show(command, words):
    try:
        get_command(app)([*words, "--help"], prog_name="scorekit")
    except SystemExit as end:
        assert end.code == 0, words
    if isinstance(command, LazyCommand) and command.entry.settings is None:
        command = command.load()
    for name, part in getattr(command, "commands", {}).items():
        show(part, [*words, name])

show(get_command(app), [])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("synth check", "search collect", "roleplay prepare", "serve judge", "ingest"):
        assert f"usage: scorekit {words} " in done.stdout.lower()


def test_a_package_of_no_extra_is_installed_by_its_name():
    error = ModuleNotFoundError("No module named 'nobody_has_it'", name="nobody_has_it.part")
    assert missing_package(error) == "nobody-has-it is not installed: pip install nobody-has-it"


def test_a_missing_module_of_ours_is_our_fault():
    assert missing_package(ModuleNotFoundError("x", name="scorekit.gone")) is None
    assert missing_package(ModuleNotFoundError("x")) is None
