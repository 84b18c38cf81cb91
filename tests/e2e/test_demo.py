"""Test the demo as a user starts it, shortened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from testing.servers import wait_until

ROOT = Path(__file__).parents[2]


def _start(run_dir, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--run-dir", str(run_dir), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
        start_new_session=True,
    )


def _children_of(run_dir) -> list[str]:
    """Return the services and the trainer: processes whose command line names the run's folder."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(run_dir) in command and ("services." in command or "-m trainer" in command):
                commands.append(command)
    return commands


def _tables(path) -> set[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return {name for (name,) in database.execute("select name from sqlite_master")}


@pytest.mark.slow
def test_the_demo_scores_trains_compares_and_leaves_nothing_running(tmp_path):
    for name in ("metricx.sqlite", "mine.sqlite"):  # a cache of a run before, and no cache of it
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute("create table before (k)")
    process = _start(tmp_path, "--updates", "2", "--limit", "40")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert not _tables(tmp_path / "metricx.sqlite") & {"before"}
    assert _tables(tmp_path / "mine.sqlite") == {"before"}
    for text in ("200 of 200 scored", "before", "after", "chrF (never a reward)", "report.html"):
        assert text in output
    evals = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert evals[0]["update"] == 0 and evals[-1]["update"] == 2
    assert all(line["metricx_coverage"] == line["xcomet_coverage"] == 1.0 for line in evals)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<mark" in page and "<svg" in page
    assert not _children_of(tmp_path)


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_the_demo(tmp_path):
    process = _start(tmp_path, "--updates", "50", "--limit", "40")
    wait_until(lambda: (tmp_path / "log.jsonl").exists() or process.poll() is not None, 300)
    assert len(_children_of(tmp_path)) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in output and "Traceback" not in output
    assert not _children_of(tmp_path)
