"""The demo's children end with it: on success, on failure, on Ctrl-C and on SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.servers import alive, wait_until

ROOT = Path(__file__).parents[3]
#: Starts a child that ignores SIGTERM and has a child of its own, then fails or waits.
SCRIPT = """
import pathlib, sys, time
from demo import processes
processes.STOP_S = 0.5
processes.exit_on_sigterm()
folder = pathlib.Path(sys.argv[1])
with processes.running("tests.kits.stubborn", str(folder), log=folder / "log"):
    while not (folder / "grandchild").exists():
        time.sleep(0.01)
    (folder / "up").touch()
    {then}
"""


@pytest.mark.parametrize(
    ("then", "blow", "code"),
    [
        ("pass", None, 0),
        ("raise ValueError('a failure')", None, 1),
        ("time.sleep(60)", signal.SIGINT, 130),
        ("time.sleep(60)", signal.SIGTERM, 130),
    ],
    ids=["success", "failure", "ctrl_c", "sigterm"],
)
def test_no_child_outlives_the_demo(tmp_path, then, blow, code):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then), str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until((tmp_path / "up").exists)
    children = [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
    if blow is not None:
        process.send_signal(blow)
    process.communicate(timeout=180)
    # Python dies of SIGINT by itself where nothing catches the KeyboardInterrupt.
    assert process.returncode == (-signal.SIGINT if code == 130 else code)
    wait_until(lambda: not any(map(alive, children)))
