"""Run the evidence on the loop in small: every arm, and again after a stop."""

from __future__ import annotations

import json

import pytest

from evidence.loop.curation import ARMS, FIRST, QUICK, run_seeds
from evidence.loop.report import read_results, tables


@pytest.mark.slow
def test_every_arm_runs_and_what_has_a_result_or_a_policy_is_kept(tmp_path):
    results = tmp_path / "results"
    run_seeds([FIRST, "plain"], [1], QUICK, tmp_path, results)  # a stop after two runs
    before = {path: path.read_bytes() for path in results.iterdir()}
    (results / "plain-1.json").unlink()  # killed while it measured: the policy is there
    run_seeds([], [1], QUICK, tmp_path, results)
    new_result = json.loads((results / "plain-1.json").read_text(encoding="utf-8"))
    plain = json.loads(before.pop(results / "plain-1.json"))
    assert (new_result["stats"], new_result["data"]) == (plain["stats"], plain["data"])
    assert {path: path.read_bytes() for path in before} == before
    runs = read_results(results)
    assert {run["arm"] for run in runs} == set(ARMS)
    assert {run["stats"]["questions"] for run in runs} == {QUICK.limit}
    assert "nothing is shown" in tables(runs)
