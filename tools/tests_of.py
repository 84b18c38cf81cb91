"""Name the test files of a source file, or of everything that changed.

    python -m tools.tests_of scorekit/net/retry.py    # its tests, nearest first
    python -m tools.tests_of --changed                # of what differs from HEAD
    python -m tools.tests_of --changed --base main    # of what differs from main
    make test-changed                                 # run those

A test file belongs to a source file if it has its name and folder (tests/unit/a/test_b.py and
tests/integration/a/test_b.py for a/b.py), imports it or names it (`python -m a.b`), or imports a
file that imports it; where there is none, the nearest that reaches it through more imports.
`tests/unit/test_tests_of.py` checks that every source file has tests.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from scorekit.command import run_command
from scorekit.errors import UserError
from tools.import_graph import imported_modules
from tools.language import PACKAGES

ROOT = Path(__file__).parents[1]
SOURCES = tuple(name for name in (*PACKAGES, "examples") if name != "tests")
KINDS = ("unit", "integration")
#: Rules about the whole tree. They take seconds, and any change can break them.
RULES = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_*.py")))
#: A change of these can change the result of every test.
EVERYTHING = ("tests/conftest.py", "pyproject.toml", "constraints.txt")
#: Imports between a test and the file that it tests; more only if no test is as near.
STEPS = 2


def find_tests(name: str) -> list[str]:
    """Return the test files of a file, the nearest first.

    name: path relative to the root. A file that is no Python module (a template, a rubric) has the
    tests of the modules in its folder.
    """
    path = Path(name)
    if path.name.startswith("test_") and path.suffix == ".py":
        return [name]
    modules = _modules()
    folder = path.parent
    if name not in modules.values():
        siblings = [file for file in modules.values() if Path(file).parent == folder]
        return list(dict.fromkeys(test for file in siblings for test in _by_name(file)))
    module = next(key for key, file in modules.items() if file == name)
    test_files = dict.fromkeys(_by_name(name))
    importers = reached = {module}
    steps = 0
    while importers and (steps < STEPS or not test_files):
        importers = {user for used in importers for user in _users().get(used, ())} - reached
        test_files |= dict.fromkeys(sorted(modules[user] for user in importers if _is_test(user)))
        importers = {user for user in importers if not _is_test(user)}
        reached = reached | importers
        steps += 1
    return list(test_files)


def find_all_tests(names: Iterable[str]) -> list[str]:
    """Return the test files that a change of these files can break, without repetition.

    The rules about the whole tree are always among them. Deleted files have no tests.
    """
    names = list(names)
    if any(name in EVERYTHING for name in names):
        return ["tests"]
    existing = [name for name in names if (ROOT / name).is_file()]
    tests = [test for name in existing for test in find_tests(name)]
    return list(dict.fromkeys([*RULES, *tests]))


def changed_files(base: str) -> list[str]:
    """Return what differs from a commit in the working tree, with files that git does not know.

    Raises UserError if git has no such commit.
    """
    commands = (
        ["git", "diff", "--name-only", base, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = []
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"--base {base}: {done.stderr.strip().splitlines()[0]}")
        names += done.stdout.splitlines()
    return names


def _by_name(name: str) -> list[str]:
    path = Path(name)
    tests = [ROOT / "tests" / kind / path.parent / f"test_{path.stem}.py" for kind in KINDS]
    return [str(test.relative_to(ROOT)) for test in tests if test.exists()]


def _is_test(module: str) -> bool:
    return module.rpartition(".")[2].startswith("test_")


@functools.cache
def _modules() -> Mapping[str, str]:
    """Return the path of every module, relative to the root, tests included."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): str(
            path.relative_to(ROOT)
        )
        for package in (*SOURCES, "tests")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def _users() -> Mapping[str, set[str]]:
    """Return, for each module, the modules that import it or name it or its file in a string."""
    paths = {module: ROOT / file for module, file in _modules().items()}
    module_of = {file: module for module, file in _modules().items()}
    users: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = imported_modules(path, paths)
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"[\"']((?:\w+\.)*\w+)(?:[.:]\w+)?[\"']", text):
            names |= {name, f"{name}.__main__", f"{module}.{name}"} & paths.keys()
        names |= {module_of[file] for file in re.findall(r"[\w/]+\.py", text) if file in module_of}
        for name in names - {module}:
            users.setdefault(name, set()).add(module)
    return users


def main() -> int:
    """Print the test files, a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="source files, relative to the root")
    parser.add_argument("--changed", action="store_true", help="what differs from --base")
    parser.add_argument("--base", default="HEAD", help="a commit; default: HEAD")
    arguments = parser.parse_args()
    for name in arguments.files:
        if not (ROOT / name).is_file():
            raise UserError(f"{name}: no such file under {ROOT}")
    if arguments.changed:
        tests = find_all_tests(changed_files(arguments.base))
    else:
        tests = list(dict.fromkeys(test for name in arguments.files for test in find_tests(name)))
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    run_command(main)
