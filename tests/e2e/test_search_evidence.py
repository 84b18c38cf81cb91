"""Check the measurement of a search policy that was trained before the final test existed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from demo.search.measured_sets import SETS, running_services
from evidence.search.arms import ARMS, POLICY, Plan
from evidence.search.control import random_policy
from evidence.search.runs import Job, run_job, services_of
from testing.processes import child_environment

NAME = "knows-both"  # its generator reads and knows


@pytest.mark.slow
def test_a_run_that_is_done_is_measured_on_what_it_lacks_and_not_trained_again(
    tmp_path: Path, monkeypatch
) -> None:
    """Use random weights, because the trained ones must not be tried on the final test here."""
    for name, value in child_environment().items():
        monkeypatch.setitem(os.environ, name, value)
    plan = Plan(((NAME, 1),), tmp_path, POLICY, updates=2, limit=3)
    with running_services(tmp_path, ["final_test"]) as urls:
        job = Job(plan, NAME, 1, services_of(ARMS[NAME], urls, tmp_path))
        job.folder.mkdir()
        random_policy(POLICY, job.folder / "stage-0/checkpoints/step-000002", 1)
        done = json.dumps({"stages": job.stages, "train_s": 1.0, "s": 2.0})
        (job.folder / "run.json").write_text(done, encoding="utf-8")
        (job.folder / "measured.jsonl").write_text("as it was\n", encoding="utf-8")
        run_job(job)
    assert job.is_done
    assert (job.folder / "run.json").read_text("utf-8") == done
    assert (job.folder / "measured.jsonl").read_text("utf-8") == "as it was\n"
    lines = (job.folder / "measured_final.jsonl").read_text("utf-8").splitlines()
    question_lines = SETS["final_test"].questions.read_text("utf-8").splitlines()[:3]
    assert [json.loads(line)["question"] for line in lines] == [
        json.loads(q)["id"] for q in question_lines
    ]
