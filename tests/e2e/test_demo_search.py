"""Test the search demo as a user starts it, with fewer updates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.search.compare import read_stage
from demo.search.run import QUESTION, REFERENCE
from trainer.runs.run_log import read_jsonl
from trainer.search.trajectories.store import TrajectoryStore

ROOT = Path(__file__).parents[2]
UPDATES = 8


@pytest.mark.slow
def test_a_small_policy_is_trained_in_two_phases_compared_and_shown(tmp_path):
    flags = ["--run-dir", str(tmp_path), "--updates", str(UPDATES)]
    result = subprocess.run(
        [sys.executable, "-m", "demo.search", *flags],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("58 pages of 9 documents", "after phase 2", "small print", "Not learned", "NDCG"):
        assert text in result.stdout
    (folder,) = (tmp_path / "ask").iterdir()
    (trajectory,) = TrajectoryStore(folder / "trajectories").read()
    assert trajectory.question.question == QUESTION and trajectory.answer.text == REFERENCE
    start, left = (
        read_stage("", tmp_path / "start").stats,
        read_stage("", tmp_path / "phase2", first=True).stats,
    )
    for phase in ("phase1", "phase2"):
        assert len(read_jsonl(tmp_path / phase / "log.jsonl")) == UPDATES
    # Other processors sample other episodes, and so few updates do not rise on each of them: on one
    # it was 0.37 -> 0.32. That a searcher learns is what training/test_taught.py shows.
    for stats in (start, left):
        assert 0 < stats["ndcg_mean"] < 1
    assert left["ndcg_mean"] != start["ndcg_mean"]
    for page in (folder / "view.html", tmp_path / "phase2/view.html"):
        assert "<html" in page.read_text(encoding="utf-8")
    assert "was still open" not in result.stderr
