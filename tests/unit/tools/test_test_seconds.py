"""`tools.test_seconds` counts the processor time of a test and of its processes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.kits import forked
from tools.test_seconds import FOLDER, ROOT, SecondsOfTest, processor_seconds, rows

BUSY = "import time\nwhile time.process_time() < 0.2: pass\n"


def test_the_time_of_a_process_counts_while_it_lives_and_after():
    before = processor_seconds()
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY + "print('done', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert busy.stdout.readline() == b"done\n"
    alive = processor_seconds()
    busy.communicate(b"\n")
    assert alive - before >= 0.15
    assert processor_seconds() - before >= 0.15


def test_a_test_has_the_time_of_its_fixtures_and_of_its_process(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import subprocess, sys, pytest\n"
        f"BUSY = {BUSY!r}\n"
        "def run(): subprocess.run([sys.executable, '-c', BUSY])\n"
        "@pytest.fixture\ndef shared(): run()\n"
        "def test_one(shared): run()\n"
        "def test_two(): pass\n"
    )
    script = (
        "import tools.test_seconds as t, pathlib, sys, pytest\n"
        f"t.FOLDER = pathlib.Path({str(tmp_path / 'seconds')!r})\n"
        f"assert pytest.main(['-p', 'no:cacheprovider', '-c', '/dev/null', {str(tmp_path)!r}],"
        " plugins=[t.SecondsPlugin()]) == 0\n"
        "for one in t.read_seconds(t.FOLDER): print(*one, sep='|')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    seconds = {name.rpartition("::")[2]: (float(a), float(b)) for name, a, b in lines}
    total, fixtures = seconds["test_one"]
    assert fixtures >= 0.15 and total - fixtures >= 0.15
    assert seconds["test_two"][0] < 0.15
    assert FOLDER.name not in done.stdout


def test_the_table_has_a_row_for_all_for_each_file_and_for_each_long_test():
    tests = [
        SecondsOfTest("tests/b.py::test_x", 5.04, 1.0),
        SecondsOfTest("tests/a.py::test_y", 1.0, 0.5),
        SecondsOfTest("tests/b.py::test_z", 1.5, 0.0),
    ]
    assert rows(tests) == [
        ("all", 3, 7.5, 1.5),
        ("tests/a.py", 1, 1.0, 0.5),
        ("tests/b.py", 2, 6.5, 1.0),
        ("tests/b.py::test_x", 1, 5.0, 1.0),
    ]


def test_the_time_of_a_forked_process_counts_once_when_it_has_ended(monkeypatch):
    """A worker of xdist is not the parent of the fork servers; one process alone is."""
    for owner in (0, os.getpid()):
        monkeypatch.setattr(forked, "_owner", owner)
        before = forked.seconds_of_ended
        forked.run([sys.executable, "-c", BUSY])
        seconds = forked.seconds_of_ended - before
        assert (seconds >= 0.15) == (owner == 0)
        assert processor_seconds() >= forked.seconds_of_ended
