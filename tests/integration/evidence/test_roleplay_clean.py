"""Run the evidence on a cleanly trained role-play policy in small: start, judge and every arm."""

from __future__ import annotations

import pytest

from evidence.roleplay.clean import ARMS, QUICK, START, read_results, run_plan, tables


@pytest.mark.slow
def test_every_arm_runs_and_what_has_a_result_is_kept(tmp_path):
    results = tmp_path / "results"
    run_plan(tmp_path / "runs", results, ["sft"], [1], QUICK)  # a stop after two runs
    before = (results / "sft-1.json").read_bytes()
    run_plan(tmp_path / "runs", results, [], [1], QUICK)
    assert (results / "sft-1.json").read_bytes() == before
    runs = {run["arm"]: run for run in read_results(results)["runs"]}
    assert set(runs) == {START, *ARMS}
    for name, run in runs.items():
        assert {len(values) for values in run["stats"].values()} == {QUICK.turns}
        assert all(score < 0 for score in run["stats"]["judge"])
        assert (run["processor_seconds"] > 0) == (name != START)
    assert "nothing is shown" in tables(read_results(results))
