"""Check that every long benchmark runs to its end in small, and gives a number for each
question."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A module, and the files that it writes.
BENCHES = {
    "bench": (
        "serving",
        "ray_serve",
        "scoring",
        "embeddings",
        "trl_step",
        "search_step",
        "offsets",
        "reward_wait",
        "rewards",
    ),
    "bench.filters": ("filters",),
    "bench.generator_images": ("generator_images",),
    "bench.judge_upstream": ("judge_upstream",),
    "bench.curation": ("curation",),
    "bench.llm_client": ("llm_client",),
    "bench.retrieval.callers": ("retrieval_callers",),
    "bench.retrieval.service": ("retrieval",),
    "bench.retrieval.size": ("retrieval_size",),
    "bench.ranks": ("ranks",),
    "bench.reward_model.service": ("reward_model",),
    "bench.rewards": ("rewards",),
    "bench.scaling": ("scaling",),
    "bench.scaling.checks": ("overlap",),
    "bench.scaling.killed": ("killed_sampler",),
    "bench.scaling.lengths": ("scaling_lengths",),
    "bench.search_episodes": ("search_episodes",),
    "bench.search_stream": ("search_stream",),
    "bench.synth.driver": ("synth_driver",),
    "bench.turns": ("turns",),
}


#: `bench` compares our COMET with unbabel-comet's, in the oracle's environment.
MARKS = {"bench": pytest.mark.oracle}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=MARKS.get(name, ())) for name in BENCHES]
)
def test_a_benchmark_runs_in_small(module):
    started_at = time.time()
    result = subprocess.run(
        [sys.executable, "-m", module, "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name in BENCHES[module]:
        path = ROOT / "runs/bench" / f"{name}.json"
        assert path.stat().st_mtime >= started_at - 1, f"{path} is an older one"
        report = json.loads(path.read_text(encoding="utf-8"))
        assert report["quick"] and report["figures"]
        for stat in report["figures"]:
            assert stat["value"] is not None and math.isfinite(stat["value"]), stat


@pytest.mark.slow
def test_the_meta_evaluation_runs_in_small():
    command = [sys.executable, "-m", "bench.meta_eval", "--quick"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((ROOT / "runs/bench/meta_eval.json").read_text(encoding="utf-8"))
    assert set(report["sets"]) == {"ende", "zhen"} and report["quick"]
    for set_report in report["sets"].values():
        assert [m["name"] for m in set_report["metrics"]][:3] == [
            "constant",
            "length only",
            "all marked",
        ]
        assert len(set_report["metrics"]) == 8 and all(
            not m["failed"] for m in set_report["metrics"]
        )


@pytest.mark.slow
def test_the_search_evidence_runs_in_small():
    module = "evidence.search"
    folder = ROOT / "runs/bench/search"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", module, "--quick"]
    for _ in range(2):  # finished work is not run again
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        paths = sorted((folder / "results").glob("*.json"))
        assert [path.stem for path in paths] == ["both-1", "sft-1", "start-0"]
        for report in (json.loads(path.read_text(encoding="utf-8")) for path in paths):
            assert list(report["sets"]) == ["held_out"]
            assert report["sets"]["held_out"]["questions"] == 3
            if report["arm"] == "both":
                assert len(report["by_update"]["ndcg_mean"]) == 2
    assert "seed 1:" not in result.stderr
