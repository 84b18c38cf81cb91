"""Check that the demo's children end with it: on success, failure, Ctrl-C, SIGTERM and SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from scorekit.errors import UserError
from testing import processes
from testing.servers import alive, wait_until

ROOT = Path(__file__).parents[3]
#: Starts a child that ignores SIGTERM and has its own child, then fails or waits.
SCRIPT = """
import pathlib, sys, time
from testing import processes
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
    # Python itself dies of SIGINT if no code catches the KeyboardInterrupt.
    assert process.returncode == (-signal.SIGINT if code == 130 else code)
    wait_until(lambda: not any(map(alive, children)))


#: Starts a server and waits.
SERVING = """
import pathlib, sys, time
from testing.processes import exit_on_sigterm, running
exit_on_sigterm()
folder = pathlib.Path(sys.argv[1])
with running("http.server", "--bind", "127.0.0.1", "0", log=folder / "log") as server:
    (folder / "pid.new").write_text(str(server.pid))
    (folder / "pid.new").rename(folder / "pid")
    time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends them")
def test_a_server_of_the_demo_ends_when_the_demo_is_killed(tmp_path):
    demo = subprocess.Popen([sys.executable, "-c", SERVING, str(tmp_path)], cwd=ROOT)
    wait_until((tmp_path / "pid").exists)
    server = int((tmp_path / "pid").read_text())
    assert alive(server)
    demo.kill()
    demo.wait()
    wait_until(lambda: not alive(server))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends them")
def test_the_demo_and_its_servers_end_when_the_make_that_runs_it_is_killed(tmp_path):
    (tmp_path / "Makefile").write_text(
        f"demo:\n\t{sys.executable} {tmp_path / 'serving.py'} {tmp_path}\n"
    )
    (tmp_path / "serving.py").write_text(SERVING)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    make = subprocess.Popen(["make", "-s", "demo"], cwd=tmp_path, env=environment)
    wait_until((tmp_path / "pid").exists)
    server = int((tmp_path / "pid").read_text())
    make.kill()
    make.wait()
    wait_until(lambda: not alive(server))


def test_services_are_started_before_the_first_is_waited_for(tmp_path, monkeypatch):
    logs = [tmp_path / "judge.log", tmp_path / "embedder.log"]
    running_when_waited: list[bool] = []
    wait_ready = processes._wait_ready

    def noting(*args):
        running_when_waited.append(all(log.exists() for log in logs))
        wait_ready(*args)

    monkeypatch.setattr(processes, "_wait_ready", noting)
    services = {"judge": (), "embedder": ("--model", str(ROOT / "demo/models/encoder"))}
    with processes.running_services(tmp_path, services) as urls:
        for name, url in urls.items():
            with urllib.request.urlopen(f"{url}/v1/info") as answer:
                assert json.load(answer)["service"] == name
    assert running_when_waited == [True, True]


def test_a_service_that_ends_is_named_with_its_log_and_ends_the_others(tmp_path):
    services = {"judge": (), "embedder": ("--model", str(tmp_path / "missing"))}
    with (
        pytest.raises(UserError, match=r"(?s)embedder ended; the end of .*missing"),
        processes.running_services(tmp_path, services),
    ):
        pass
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            commands.append(entry.read_bytes())
    assert commands and not any(str(tmp_path).encode() in command for command in commands)


def test_services_that_start_at_once_have_different_ports(tmp_path, monkeypatch):
    first, second = processes.free_port(), processes.free_port()
    ports = iter([first, first, second])
    monkeypatch.setattr(processes, "free_port", lambda: next(ports))
    services = {"judge": (), "embedder": ("--model", str(ROOT / "demo/models/encoder"))}
    with processes.running_services(tmp_path, services) as urls:
        assert urls == {
            "judge": f"http://127.0.0.1:{first}",
            "embedder": f"http://127.0.0.1:{second}",
        }
