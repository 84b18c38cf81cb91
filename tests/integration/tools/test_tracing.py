"""The tracer records what runs in a part of a command, and a sample's way gets no longer."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from testing.processes import end
from tests.kits import forked
from tools.tracing import __main__ as tracing
from tools.tracing.record import ROOT

#: Its functions are of a package that counts, so the module is written there for the test.
MODULE = """
import threading

def helper():
    return [inner() for _ in range(2)]

def inner():
    return 1

def elsewhere():
    return 2

def work():
    helper()

def waits(event, done):
    event.wait()
    done.set()

AT_IMPORT = elsewhere()

if __name__ == "__main__":
    go, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits, args=(go, done))
    thread.start()
    work()
    def last():
        go.set()
        done.wait()
        helper()
    last()
    elsewhere()
"""


def traced(tmp_path, *flags):
    (tmp_path / "traced_work.py").write_text(MODULE)
    # The module stands outside the packages; a line of the run's own says that it counts.
    code = (
        "import sys; from tools.tracing import record; "
        f"record.ROOT = record.Path({str(tmp_path.parent)!r}); "
        f"record.PACKAGES = ({tmp_path.name!r},); "
        "sys.exit(record.main())"
    )
    out = tmp_path / "trace.json"
    command = [sys.executable, "-c", code, "--out", str(out), *flags, "traced_work"]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (trace,) = json.loads(out.read_text()).values()
    return trace


def test_all_of_a_command_is_recorded(tmp_path):
    trace = traced(tmp_path)
    names = {name for name in trace["functions"] if "<" not in name}
    assert names == {"helper", "inner", "work", "waits", "last", "elsewhere"}
    assert trace["lines"] == len(MODULE.splitlines())


def test_a_call_is_recorded_with_what_it_calls_and_what_goes_on_meanwhile(tmp_path):
    trace = traced(tmp_path, "--within", "last")
    names = {name for name in trace["functions"] if "<" not in name}
    assert names == {"last", "helper", "inner", "waits"}  # waits began before
    assert trace["lines_of_functions"] == 4 + 2 + 2 + 3


def test_only_the_named_call_is_recorded(tmp_path):
    trace = traced(tmp_path, "--within", "helper", "--call", "2")
    assert {name for name in trace["functions"] if "<" not in name} == {"helper", "inner"}


def test_a_call_that_does_not_come_is_a_users_mistake(tmp_path):
    command = [sys.executable, "-m", "tools.tracing.record", "--out", str(tmp_path / "t.json")]
    command += ["--within", "nowhere", "scorekit", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--within nowhere: call 1 of it did not come" in done.stderr


@contextmanager
def running(*args, log):
    """Run a service as `testing.processes.running` does, but with torch loaded before."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", *args]
        process = forked.Popen(
            command, torch=True, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def test_a_sample_passes_no_more_files_than_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "running", running)
    page = tracing.DOCUMENT.read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if tracing.TRACES["sample"][0] in line)
    num_files = int(row.split("|")[2])
    trace = tracing.trace_sample(tmp_path)
    assert "services/xcomet/model.py" in trace  # the model was asked
    assert len(trace) <= num_files, sorted(trace)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tracing.TRACES if name != "sample"])
def test_other_work_is_traced_to_its_end(name, tmp_path):
    last_file = {
        "prompt": "trainer/rl/update.py",
        "question": "trainer/rl/update.py",
        "sentence": "synth/export/files.py",
        "curation": "trainer/search/steps/buckets.py",
        "paid-curation": "trainer/search/answer/models.py",
    }
    assert last_file[name] in tracing.TRACES[name][1](tmp_path)
