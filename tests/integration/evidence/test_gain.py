"""Run the evidence on gain in small: start, metrics, every arm, and a stop in between."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.common import ROOT
from demo.train.common import setup
from evidence.gain.arms import ARMS, COOLER, LONGER, QUICK, ROUND, START, make_plan
from evidence.gain.data import DIRECTIONS
from evidence.gain.report import read_results, tables
from evidence.gain.runs import result_path, run_plan
from evidence.gain.start import copy_tokenizers, is_flat, make_metrics, make_policy


def test_sft_goes_on_as_long_as_chrf_rises():
    assert not is_flat([18.0]) and not is_flat([18.0, 18.9])
    assert is_flat([18.0, 18.9, 19.0]) and is_flat([18.0, 17.0])


@pytest.mark.slow
def test_start_and_metrics_are_made_and_a_second_call_makes_no_metric_again(tmp_path):
    setup(1)
    copy_tokenizers()
    stats = make_policy(tmp_path, DIRECTIONS["ko-en"], steps=4, round_steps=2, limit=4)
    assert [line["stage"] for line in stats["curve"]][:4] == ["at25", "at50", "final", "round1"]
    assert stats["curve"][-1]["stage"] != stats["chosen"]  # the round after it is there, too
    assert (tmp_path / "policy/config.json").is_file()
    rounds = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("sft/round*/model.safetensors")
    }
    assert make_policy(tmp_path, DIRECTIONS["ko-en"], steps=4, round_steps=2, limit=4) == stats
    assert {path: path.stat().st_mtime_ns for path in rounds} == rounds
    metrics = make_metrics(tmp_path, DIRECTIONS["ko-en"], steps=2, limit=4)
    assert set(metrics) == {"metricx", "xcomet"}
    assert (tmp_path / "metricx/model.safetensors").is_file()
    before = (tmp_path / "xcomet/checkpoints/model.ckpt").stat().st_mtime_ns
    make_metrics(tmp_path, DIRECTIONS["ko-en"], steps=2, limit=4)
    assert (tmp_path / "xcomet/checkpoints/model.ckpt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_every_arm_runs_and_what_is_done_is_kept(tmp_path):
    plan = make_plan(quick=True, seeds=[1], size=QUICK)
    plan = replace(plan, folder=tmp_path, results=tmp_path / "results")
    run_plan(replace(plan, runs=plan.runs[:3]))  # a stop after three runs
    first = result_path(plan, *plan.runs[1]).read_bytes()
    run_plan(plan)
    assert result_path(plan, *plan.runs[1]).read_bytes() == first
    results = read_results(plan.results)
    assert {run["arm"] for run in results["runs"]} == set(ARMS) - {ROUND}
    for run in results["runs"]:
        assert set(run["sets"]) == {"test", "tracked"}
        assert run["sets"]["test"]["reward_coverage"] == 1
        assert (run["processor_seconds"] > 0) == (run["arm"] not in (START, COOLER, LONGER))
        assert str(ROOT) not in json.dumps(run)
    assert "nothing is shown" in tables(results)
