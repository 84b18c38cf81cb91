"""Check several drivers of one folder: who waits, what is printed, and which input is ignored."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scorekit.client.transport import attempts
from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.files import write_atomic
from scorekit.locks import hold_locks, holder
from scorekit.net.retry import Deadline
from synth.__main__ import app
from synth.execution.stage import StageProgress
from synth.log import log_to
from synth.run import RunOptions, run_stage
from synth.stages.table import BY_NAME
from synth.storage.store import ShardWriter, StageFolder, read_records
from testing.corpus import write_corpus
from tests.kits import forked
from tests.kits.synth.driver import TEXTS, config, write_sources

HOLDS = (
    "import os, pathlib, signal, sys\n"
    "from scorekit.locks import try_lock\n"
    "lock = try_lock(pathlib.Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "os.kill(os.getpid(), signal.SIGSTOP)"
)


def stopped_with(lock):
    """Start a process that holds a lock and does nothing else."""
    process = forked.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.mark.parametrize("which", ["sample_sources-merge", "sample_sources-00000", "views"])
def test_who_waits_for_a_process_that_was_stopped_says_so(
    tmp_path,
    teacher,
    metricx,
    which,
):
    write_corpus(tmp_path / "corpus.jsonl.gz", 5)
    cfg = config(
        tmp_path / "run", teacher, metricx, data__files=[str(tmp_path / "corpus.jsonl.gz")]
    )
    folder = StageFolder(cfg.run.out_dir, "sample_sources")
    process = stopped_with(folder.lock().with_name(f"{which}.lock"))
    lines = []

    def print_line(line):
        if "waits for process" in line:  # another line says that the corpus is too small
            lines.append(line)
            process.send_signal(signal.SIGKILL)
            process.wait()

    options = RunOptions(("sample_sources",))
    run_stage("sample_sources", cfg, options, StageProgress(print_line=print_line))
    assert folder.done()
    (line,) = lines
    assert f"waits for process {process.pid} on" in line


def test_nobody_is_named_who_let_go(tmp_path):
    path = tmp_path / "stage.lock"
    with hold_locks([(path, False)], "clear it"):
        assert holder(path).startswith("process ")
    with hold_locks([(path, True)], "read it"):
        assert holder(path) == "another process"


def test_two_writers_of_a_shard_leave_the_whole_file_of_one(tmp_path):
    path = tmp_path / "shard.jsonl.zst"  # on a file system without locks
    first = ShardWriter(path)
    first.write({"by": 1})
    second = ShardWriter(path)
    second.write({"by": 2})
    second.write({"by": 2})
    with first, pytest.raises(FileNotFoundError):
        first.commit()
    with second:
        second.commit()
    assert list(read_records(path)) == [{"by": 2}] * 2
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_processes_of_one_number_on_two_machines_write_files_of_their_own(tmp_path, monkeypatch):
    seen = []
    replace = __import__("os").replace
    monkeypatch.setattr("os.replace", lambda old, new: (seen.append(old), replace(old, new)))
    for _ in range(2):
        write_atomic(tmp_path / "stage.json", b"{}")
    assert len(set(seen)) == 2


def test_what_a_server_says_is_shown_on_the_terminal_and_not_obeyed(
    tmp_path,
    teacher,
    metricx,
):
    folder = tmp_path / "run [/red] [link=x]"
    write_sources(folder, TEXTS)
    cfg = config(folder, teacher, metricx)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    command = ["run", "--config", str(path), "--stage", "prefilter_score"]
    teacher.fail(404, message="no model \x1b]0;mine\x07 \x9b2J here", times=None)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "here" in result.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(result.output)
    teacher.well()
    result = CliRunner().invoke(app, [*command, "--resume"])
    assert result.exit_code == 0 and f"run folder: {folder}" in result.output.replace("\n", "")
    assert BY_NAME["prefilter_score"].name in result.output


def test_what_a_scoring_service_is_asked_again_stands_in_the_log_alone(tmp_path, caplog):
    log_to(tmp_path / "logs.txt", "INFO")
    errors = [
        RequestError("unavailable", "a text of somebody's", status=503),
        ServiceUnreachable("http://127.0.0.1:9", "a text of somebody's"),
    ]

    async def work():
        async for attempt in attempts(Deadline(60), lambda: 0.0):
            with attempt:
                if errors:
                    raise errors.pop(0)

    asyncio.run(work())
    log_text = (tmp_path / "logs.txt").read_text()
    assert "scoring service: unavailable, HTTP 503; attempt 1, again in" in log_text
    assert "scoring service: no answer; attempt 2, again in" in log_text
    assert "somebody" not in log_text
    assert not caplog.records  # the root logger has a handler here, as in Ray
