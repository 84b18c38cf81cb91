"""`tools.tests_of` finds the tests of every file, and the folders of tests mirror the tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scorekit.errors import UserError
from tools.tests_of import (
    EVERYTHING,
    KINDS,
    ROOT,
    RULES,
    SOURCES,
    changed_files,
    find_all_tests,
    find_tests,
)

#: Scripts that people run by hand, some for hours. The rest of the tree has tests.
SCRIPTS = ("bench", "demo/train", "evidence", "examples", "tools")


def source_files():
    """Return the Python files of all packages but the scripts, relative to the root."""
    files = [
        str(path.relative_to(ROOT))
        for package in SOURCES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return [name for name in files if not name.startswith(SCRIPTS)]


def test_every_source_file_has_tests():
    assert not [name for name in source_files() if not find_tests(name)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_tests_is_a_folder_or_a_file_of_the_tree(kind):
    root = ROOT / "tests" / kind
    folders = {path.parent.relative_to(root) for path in root.rglob("test_*.py")}
    mirrored = [
        f for f in folders if (ROOT / f).is_dir() or (ROOT / f).with_suffix(".py").is_file()
    ]
    assert folders == set(mirrored)


def test_the_test_of_the_same_name_comes_first():
    assert find_tests("trainer/rl/loss.py")[0] == "tests/unit/trainer/rl/test_loss.py"


def test_a_test_that_names_a_module_in_a_command_belongs_to_it():
    assert "tests/e2e/test_demo.py" in find_tests("demo/run.py")


def test_a_changed_test_is_its_own_test_and_rules_always_run():
    name = "tests/unit/trainer/rl/test_loss.py"
    assert find_all_tests([name, "trainer/rl/no_longer_there.py"]) == [*RULES, name]


def test_a_template_has_the_tests_of_its_folder():
    assert find_tests("synth/report/report.html") == [
        test for path in sorted(Path(ROOT, "synth/report").glob("*.py"))
        for kind in KINDS
        if (ROOT / (test := f"tests/{kind}/synth/report/test_{path.stem}.py")).exists()
    ]  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_every_test_depends_on_runs_them_all(name):
    assert find_all_tests(["scorekit/errors.py", name]) == ["tests"]


def test_changed_files_are_those_of_git_and_new_ones(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    (tmp_path / "kept.py").write_text("1")
    (tmp_path / "changed.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "changed.py").write_text("2")
    (tmp_path / "new.py").write_text("3")
    monkeypatch.setattr("tools.tests_of.ROOT", tmp_path)
    assert changed_files("HEAD") == ["changed.py", "new.py"]
    with pytest.raises(UserError, match="--base no-such-commit"):
        changed_files("no-such-commit")
