"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "AGENTS.md",
    *sorted((ROOT / "services").glob("*/README.md")),
    ROOT / "demo/README.md",
    ROOT / "examples/README.md",
]
_PATH = re.compile(
    r"(?<![\w/.-])((?:scorekit|services|trainer|demo|configs|docs|tests|tools|bench|examples)/[\w./-]*[\w/])"
)
_TARGET = re.compile(r"`?make ([a-z-]+)`?")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_document_names_exist(path):
    for name in _PATH.findall(path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_that_a_document_names_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in path.read_text(encoding="utf-8").splitlines():
        for target in _TARGET.findall(line) if "`make" in line or line.startswith("make") else []:
            assert f"\n{target}:" in makefile, f"{path.name} names make {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_document_says_where_its_commands_are_found(path):
    """Who pastes them has no `python` of ours on the path."""
    text = path.read_text(encoding="utf-8")
    command = r"(?:^|`)(?:python -m |python examples|synth_parallel [a-z])"
    bare = re.search(command, text, re.MULTILINE)
    told = re.search(r"source \.venv/bin/activate|\.venv/bin/python", text)
    assert bare is None or (told and told.start() < bare.start()) or path.name == "AGENTS.md", bare


def test_the_readme_is_short_and_its_first_command_comes_early():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 200
    assert any(line.startswith("make demo") for line in lines[:25])


def test_every_setting_and_wire_field_stands_in_the_protocol_or_the_help():
    from scorekit import schemas

    text = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    models = (
        schemas.TranslationSample,
        schemas.XCometOptions,
        schemas.Scored,
        schemas.JudgeSample,
        schemas.JudgeOptions,
        schemas.JudgeScored,
    )
    for model in models:
        for name in model.model_fields:
            assert f"`{name}" in text or f'"{name}"' in text, f"{model.__name__}.{name}"


def test_nobody_is_told_to_install_what_is_not_published():
    """`pip install scorekit[...]` asks the registry; the extras are those of the checkout."""
    text = {".py", ".md", ".sh", ".yaml", ".yml", ".toml", ".ipynb"}
    rooms = (
        "scorekit",
        "services",
        "trainer",
        "synth",
        "tools",
        "deploy",
        "docs",
        "examples",
        "demo",
        "bench",
        "README.md",
        "CHANGELOG.md",
    )
    files = [p for room in rooms for p in [ROOT / room, *(ROOT / room).rglob("*")] if p.is_file()]
    for path in files:
        if path.suffix in text:
            told = path.read_text(encoding="utf-8")
            assert not re.search(r"pip install [^\n`]*scorekit([\[`\"'])", told), path
