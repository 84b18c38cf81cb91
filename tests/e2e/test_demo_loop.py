"""Test the loop demo as a user starts it, with one update a training, stopped and restarted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.servers import wait_until
from trainer.runs.run_log import read_jsonl
from trainer.search.rounds.steps import read_steps

ROOT = Path(__file__).parents[2]
FLAGS = ("--updates", "1", "--every", "20")


def demo(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo.search.loop", "--run-dir", str(folder), *FLAGS],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_rounds_are_stopped_and_gone_on_with_to_the_last(tmp_path: Path) -> None:
    first = tmp_path / "rounds/01-phase1"
    with demo(tmp_path) as stopped:
        wait_until(lambda: "verify" in read_steps(first), 600)
        stopped.terminate()  # the loop is killed, and its step with it
        stopped.communicate(timeout=120)
    before = read_steps(first)
    assert stopped.returncode == 130 and not before["verify"].done
    with demo(tmp_path) as restarted:
        output, _ = restarted.communicate(timeout=1800)
    assert restarted.returncode == 0, output
    rounds = [read_steps(tmp_path / "rounds" / name) for name in ("01-phase1", "02-round1")]
    for name in ("train", "policy", "alternatives", "buckets"):
        assert rounds[0][name] == before[name]  # done before, and not started again
        assert f"[01-phase1] {name}: done" in output
    assert rounds[0]["verify"].starts == 2
    assert list(rounds[1]) == [
        "train",
        "policy",
        "diagnose",
        "hallucinations",
        "buckets",
        "focus",
        "distill",
        "sft",
    ] + (["sft-policy"] if not rounds[1]["sft"].note else [])
    assert all(step.done for steps in rounds for step in steps.values())
    num_focus_rows = len(read_jsonl(first / "focus/rows.jsonl"))
    last = tmp_path / "rounds/03-round2"
    assert num_focus_rows and len(read_jsonl(last / "train/log.jsonl")) == 1
    assert (last / "policy/model.safetensors").is_file()
    texts = ("wrong references", "pages with the same fact", "known by heart", "held out: NDCG")
    for text in (*texts, "page: "):
        assert text in output
    page = (tmp_path / "rounds/rounds.html").read_text(encoding="utf-8")
    assert "01-phase1/focus/report.html" in page and "<script" not in page
