"""Test the synthesis demo as a user starts it, shortened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_ends_with_parquet_report_and_the_best_pairs(tmp_path):
    run = tmp_path / "run"
    less = {
        "data.sample_pool_size": 40,
        "data.target_examples_total": 6,
        "final_generation.num_candidates": 8,
    }
    flags = [part for key, value in less.items() for part in ("--set", f"{key}={value}")]
    result = subprocess.run(
        [sys.executable, "-m", "demo.synth", "--run-dir", str(run), *flags],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    pairs = load_dataset(
        "parquet",
        data_files=str(run / "export/train.parquet"),
        cache_dir=str(tmp_path / "datasets"),
    )["train"]
    assert 1 <= len(pairs) <= 6 and f"{len(pairs)} in {run}" in result.stdout.replace("\n", "")
    assert pairs[0]["pair_id"] == "en->ko"
    assert (
        "<img" in (run / "report.html").read_text() or "<svg" in (run / "report.html").read_text()
    )
    rejected = [json.loads(line) for line in (run / "rejected.jsonl").read_text().splitlines()]
    late = [r for r in rejected if r["stage"] != "sample_sources"]
    assert len(pairs) + len(late) == 40
