"""Check kill -9 of a driver: requests in flight are repeated, and no others."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from testing.servers import PATIENCE_S, wait_until
from tests.kits import forked
from tests.kits.synth.driver import (
    STAGES,
    TEXTS,
    config,
    count_repeated_requests,
    most_in_flight,
    records,
    run,
    write_sources,
)

ROOT = Path(__file__).parents[4]
KILLS = 3
PREFILTER = STAGES[0].name


@contextmanager
def driver(cfg, stage, *flags):
    """Start a process that runs a stage, as a user does."""
    file = cfg.run.out_dir / "c.yaml"
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    command = [sys.executable, "-m", "synth", "run", "--config", str(file), "--stage", stage]
    with forked.Popen(
        [*command, "--resume", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process):
    """Wait for it, and check that it succeeded."""
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr


def number(body):
    """Return the number of the requested sentence, or -1 if there is none."""
    match = re.search(r"Sentence number (\d+) ", body["messages"][-1]["content"])
    return int(match[1]) if match else -1


@pytest.mark.parametrize(("requests", "sequences"), [(3, None), (8, 12)])
def test_a_killed_driver_asks_again_for_what_was_in_flight_at_most(
    tmp_path, teacher, metricx, requests, sequences
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.max_concurrency, cfg.teacher.max_sequences = requests, sequences
    run(cfg, stages=STAGES[:2])
    chosen = [int(r["source_text"].split()[2]) for r in records(tmp_path, "select_sources")]
    bound = most_in_flight(cfg, cfg.final_generation.num_candidates)
    teacher.forget()
    for kill in range(KILLS):
        answered = {-1, *chosen[: kill + 1]}  # the others keep their positions
        teacher.hang = lambda body, answered=answered: number(body) not in answered
        with driver(cfg, "generate_128") as process:
            wait_until(lambda: teacher.sequences_in_flight == bound)
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        wait_until(lambda: not teacher.in_flight)
    teacher.well()
    with driver(cfg, "generate_128") as process:
        finished(process)
    assert len(records(tmp_path, "generate_128")) == len(chosen)
    assert 0 < count_repeated_requests(teacher.requests) <= KILLS * bound


@pytest.fixture
def many(tmp_path, teacher, metricx):
    """Return a config with more sources than a driver handles at once, and a teacher that
    blocks."""
    write_sources(tmp_path, [f"Sentence number {i} is to be translated." for i in range(160)])
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.max_concurrency = 4
    teacher.forget()
    teacher.hang = lambda body: number(body) >= 0
    yield cfg
    teacher.well()


def test_of_two_drivers_one_that_is_killed_costs_what_it_had_in_flight(many, teacher):
    bound = most_in_flight(many, 1)
    with driver(many, PREFILTER) as first, driver(many, PREFILTER) as second:
        wait_until(lambda: teacher.in_flight == 2 * bound)
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: teacher.in_flight == bound)
        teacher.well()
        finished(second)
    assert len(records(many.run.out_dir, PREFILTER)) == 160
    assert 0 < count_repeated_requests(teacher.requests) <= bound


def test_several_processes_that_are_killed_cost_what_one_would(many, teacher):
    bound = most_in_flight(many, 1)
    with driver(many, PREFILTER, "--processes", "2") as process:
        wait_until(lambda: teacher.in_flight == bound)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not teacher.in_flight)
    teacher.well()
    with driver(many, PREFILTER) as process:
        finished(process)
    assert len(records(many.run.out_dir, PREFILTER)) == 160
    assert 0 < count_repeated_requests(teacher.requests) <= bound
