"""Measure the seconds of processor time that each test takes, its processes included.

    python -m tools.test_seconds run tests -n 2 --dist worksteal -m "not slow"
    python -m tools.test_seconds show [--limit 40]
    python -m tools.test_seconds write

`run` passes its arguments to pytest, and keeps a line for each test under runs/test-seconds. `show`
prints the files and tests that take most. `write` puts the table of files and of the tests above
`LONG_S` into tests/seconds.tsv.

Processor time is what a busy machine can measure, too: waits cost a developer time, but no core.
The time of a fixture that several tests share counts for the first of them, in the column of its
set-up. The time of a process counts for the test that runs at that moment.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scorekit.command import run_command
from scorekit.errors import UserError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs/test-seconds"
TABLE = ROOT / "tests/seconds.tsv"
#: A test of more seconds stands in the table by name.
LONG_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_HEADER = ("file or test", "tests", "seconds", "of these in fixtures")


class SecondsOfTest(NamedTuple):
    """Seconds of processor time of one test.

    fixtures: of these, in set-up and teardown.
    """

    test: str
    total: float
    fixtures: float

    @property
    def file(self) -> str:
        """Return the path of the test's file, relative to the root."""
        return self.test.partition("::")[0]


def processor_seconds() -> float:
    """Return the processor time of this process and of all processes below it, so far.

    A process that was forked for this one by the tests' fork server counts when it has ended."""
    used = os.times()
    below = sum(map(_seconds_of, _below(os.getpid())))
    forked = getattr(sys.modules.get("tests.kits.forked"), "seconds_of_ended", 0.0)
    return used.user + used.system + used.children_user + used.children_system + below + forked


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs, which are alive."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(word) for word in children.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in pids:
            yield child
            yield from _below(child)


def _seconds_of(pid: int) -> float:
    """Return the time of a process and of its children that have ended; 0 if it has ended."""
    try:
        # The name of a program may have spaces, and stands in brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


# -- the plugin of pytest --------------------------------------------------------------------------


class SecondsPlugin:
    """Writes a line for each test of this process."""

    def __init__(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._path = FOLDER / f"{os.getpid()}.jsonl"
        self._called = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[Any]:
        """Measure the time to collect the tests, and what the process has used before."""
        result = yield
        self._write("(to start and collect)", processor_seconds(), 0.0)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Measure a test from its set-up to its teardown."""
        before, self._called = processor_seconds(), 0.0
        result = yield
        total = processor_seconds() - before
        self._write(item.nodeid, total, total - self._called)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[Any]:
        """Measure the test itself."""
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self._called = processor_seconds() - before

    def _write(self, test: str, total: float, fixtures: float) -> None:
        line = {"test": test, "total": round(total, 3), "fixtures": round(fixtures, 3)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, as `-p tools.test_seconds` does in each process of a run."""
    config.pluginmanager.register(SecondsPlugin(), "test-seconds")


# -- the tables ------------------------------------------------------------------------------------


def read_seconds(folder: Path = FOLDER) -> list[SecondsOfTest]:
    """Return the tests of the last run. Raises UserError if there is none."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.open("rb")]
    if not lines:
        raise UserError(f"{folder} has no seconds. Run `python -m tools.test_seconds run` first")
    return [SecondsOfTest(**json.loads(line)) for line in lines]


def rows(tests: list[SecondsOfTest]) -> list[tuple[str, int, float, float]]:
    """Return the table: a row for all, one for each file, and one for each long test."""
    by_file: defaultdict[str, list[SecondsOfTest]] = defaultdict(list)
    for test in tests:
        by_file[test.file].append(test)
    groups = {"all": tests} | dict(sorted(by_file.items()))
    groups |= {test.test: [test] for test in sorted(tests) if test.total > LONG_S}
    return [
        (
            name,
            len(group),
            round(sum(test.total for test in group), 1),
            round(sum(test.fixtures for test in group), 1),
        )
        for name, group in groups.items()
    ]


def _run(arguments: list[str]) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-p", "tools.test_seconds", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


def _show(limit: int) -> None:
    table = rows(read_seconds())
    print(f"{table[0][2]:8.1f} s  {table[0][1]} tests")
    for is_test, title in ((False, "files"), (True, "tests")):
        print(f"\n{title}:")
        of_kind = [row for row in table[1:] if ("::" in row[0]) == is_test]
        for name, count, seconds, fixtures in sorted(of_kind, key=lambda row: -row[2])[:limit]:
            print(f"{seconds:8.1f} s  {fixtures:6.1f} in fixtures  {count:4}  {name}")


def _write() -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(_HEADER)
        writer.writerows(rows(read_seconds()))
    print(f"wrote {TABLE.relative_to(ROOT)}")


def main() -> int:
    """Run a command; see the module."""
    if sys.argv[1:2] == ["run"]:
        return _run(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tools.test_seconds", description=__doc__)
    parser.add_argument("command", choices=("show", "write"))
    parser.add_argument("--limit", type=int, default=40, help="rows of each kind that are shown")
    options = parser.parse_args()
    if options.command == "show":
        _show(options.limit)
    else:
        _write()
    return 0


if __name__ == "__main__":
    run_command(main)
