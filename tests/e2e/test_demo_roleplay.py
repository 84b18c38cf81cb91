"""Test the role-play demo as a user starts it, with fewer updates of GRPO."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.roleplay.compare import read_stage
from trainer.runs.run_log import read_jsonl

ROOT = Path(__file__).parents[2]
UPDATES = 8


@pytest.mark.slow
def test_sft_mends_the_end_of_a_reply_and_grpo_the_rest(tmp_path):
    flags = ["--run-dir", str(tmp_path), "--grpo-steps", str(UPDATES), "--limit", "96"]
    result = subprocess.run(
        [sys.executable, "-m", "demo.roleplay", *flags],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("FAIL stop token", "after GRPO", "chrF to the reference", "report.html"):
        assert text in result.stdout
    hurt = read_stage("", tmp_path / "start").stats
    before, after = (
        read_stage("", tmp_path / "grpo", first=first).stats for first in (True, False)
    )
    assert len(read_jsonl(tmp_path / "grpo/log.jsonl")) == UPDATES
    # Far from the measured values (1.00, 0.00), because other processors sample other replies.
    assert hurt["clipped_ratio"] > 0.9 and before["clipped_ratio"] < 0.2
    assert after["reward_mean"] > before["reward_mean"]
    assert after["reward_format_mean"] > before["reward_format_mean"]
    assert "<svg" in (tmp_path / "grpo/report.html").read_text(encoding="utf-8")
