"""Check that several processes share the shards of a stage: same bytes, one exit code."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from scorekit.errors import UserError
from synth.execution.processes import run_map_stage_on_processes
from synth.execution.stage import StageIncomplete
from synth.storage.stats import process_stats
from testing.servers import PATIENCE_S, wait_until
from tests.kits import forked
from tests.kits.spawned import forked_workers
from tests.kits.synth.driver import STAGES, config, is_paid, output, prepared, run, write_sources
from tests.kits.unwritable import Pipeline, full_device

STAGE = STAGES[0]
#: More than one process handles at once.
TEXTS = [f"Sentence number {i} is to be translated." for i in range(160)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, teacher, metricx):
    out = tmp_path_factory.mktemp("alone")
    write_sources(out, TEXTS)
    run(config(out, teacher, metricx), stages=[STAGE])
    return of_stage(out)


def start(cfg, **options):
    """Run the prefilter with two processes, and return its work."""
    manifest, work = prepared(STAGE, cfg, share=True, **options)
    with forked_workers("synth"):
        run_map_stage_on_processes(STAGE, manifest, work, 2)
    return work


def of_stage(out_dir):
    return {name: data for name, data in output(out_dir).items() if STAGE.name in name}


def test_two_processes_make_the_same_bytes_within_one_budget(
    tmp_path,
    teacher,
    metricx,
    alone,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.forget()
    seen = []
    work = start(cfg, advance=lambda done, total: seen.append((done, total)))
    assert of_stage(tmp_path) == alone
    assert teacher.peak_requests <= cfg.teacher.max_concurrency
    assert seen[0] == (0, 160) and sum(done for done, _ in seen) == 160
    assert (work.progress.stats.records_in, work.progress.stats.records_out) == (160, 160)
    stats = process_stats(work.folder)
    assert stats["processes"] == 2 and stats["teacher"]["requests"] == 320
    assert stats["teacher"] == work.progress.stats.teacher


def test_the_shards_of_a_process_that_dies_are_taken_over(
    tmp_path,
    teacher,
    metricx,
    alone,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.forget()
    lines = []
    teacher.hang = True
    working = threading.Thread(target=start, args=(cfg,), kwargs={"print_line": lines.append})
    working.start()
    try:
        wait_until(lambda: teacher.in_flight == 8)  # both processes work
        multiprocessing.active_children()[0].kill()
        wait_until(lambda: lines)
    finally:
        teacher.well()
        working.join(PATIENCE_S)
    assert "exit code -9" in lines[0]
    assert of_stage(tmp_path) == alone


def test_what_is_left_open_is_counted_once_and_asked_for_on_resume(
    tmp_path,
    teacher,
    metricx,
    alone,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.retry.max_attempts = 1
    teacher.fail(500)
    with pytest.raises(StageIncomplete, match="1 records are left open"):
        start(cfg)
    assert start(cfg, resume=True).progress.stats.open.total() == 0
    assert of_stage(tmp_path) == alone


def test_a_mistake_ends_all_in_one_line(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, teacher__model="another")
    with pytest.raises(UserError, match="does not serve a model named 'another'"):
        start(cfg)


def test_ctrl_c_ends_a_run_behind_tee(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    file = tmp_path / "config.yaml"
    cfg = config(tmp_path, teacher, metricx)
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    command = [sys.executable, "-m", "synth", "run", "--config", str(file), "--stage", STAGE.name]
    teacher.hang = is_paid
    try:
        with Pipeline(command, tmp_path) as pipeline:
            wait_until(lambda: pipeline.has_ended or teacher.in_flight == 8)
            assert pipeline.interrupt() == 130
            wait_until(lambda: not teacher.in_flight)
    finally:
        teacher.well()


def test_logs_that_cannot_be_written_change_no_record(tmp_path, teacher, metricx, alone):
    write_sources(tmp_path, TEXTS)
    file = tmp_path / "config.yaml"
    cfg = config(tmp_path, teacher, metricx)
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    (tmp_path / "logs.txt").symlink_to("/dev/full")
    command = [sys.executable, "-m", "synth", "run", "--config", str(file), "--stage", STAGE.name]
    with full_device() as stream:
        done = forked.run(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, timeout=PATIENCE_S
        )
    assert done.returncode == 0
    assert of_stage(tmp_path) == alone
    assert f"warning: {tmp_path / 'logs.txt'}: lines that were not written: " in done.stdout
    assert "warning: stderr: lines that were not written: " in done.stdout


@pytest.mark.slow
def test_they_end_with_who_started_them(tmp_path, teacher, metricx, alone):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.forget()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    command = [
        sys.executable,
        "-m",
        "synth",
        "run",
        "--config",
        str(file),
        "--processes",
        "2",
        "--stage",
        STAGE.name,
        "--resume",
    ]

    background = ["bash", "-c", 'trap "" INT; exec "$@"', "-", *command]  # as `command &` does
    for started, sent, code in (
        (command, signal.SIGINT, 130),
        (background, signal.SIGTERM, 130),
        (command, signal.SIGKILL, -9),
    ):
        teacher.hang = is_paid
        process = subprocess.Popen(
            started, cwd=Path(__file__).parents[4], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: teacher.in_flight == 8)
        process.send_signal(sent)
        assert process.wait(PATIENCE_S) == code
        wait_until(lambda: not teacher.in_flight)  # no process sends requests any more
    teacher.well()
    result = forked.run(
        command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
    assert of_stage(tmp_path) == alone
