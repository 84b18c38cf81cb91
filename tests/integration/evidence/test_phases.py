"""Check the evidence on the demo's phases: its arms, what a change is, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common import RESULTS
from demo.search.measured_sets import HELD_OUT, SETS
from evidence.phases.report import (
    BEGIN,
    END,
    PAGE,
    changes_of,
    figures_of,
    summarise,
    tables,
)
from evidence.phases.runs import ARMS, CONFIGS, START, Plan, make_plan
from evidence.search.arms import YARDSTICK
from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.search.config import SearchConfig


def line(question: int, **values: Any) -> dict[str, Any]:
    """Return a row of a measurement."""
    keys = ("ndcg", "judge", "crops", "turns", "searches", "invalid")
    row = {"question": f"q{question}", "type": "figure", "end": "complete"}
    return row | {f"{key}_mean": 0.0 for key in keys} | values


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def test_a_control_differs_from_its_phase_in_whose_reward_an_episode_gets():
    for number in (1, 2):
        phase, control = [arm for arm in ARMS.values() if arm.phase == number]
        assert (phase.start, phase.dealt, control.dealt) == (control.start, None, "chance")
    assert ARMS["phase2"].start == "phase1" and ARMS["phase1"].start == START


@pytest.mark.parametrize("number", CONFIGS)
def test_a_forced_end_costs_in_both_phases_and_is_scored_where_policies_are_measured(number):
    assert load_config(SearchConfig, CONFIGS[number]).reward.forced_completion != "score"
    measured = load_config(SearchConfig, CONFIGS[number], list(YARDSTICK))
    assert measured.reward.forced_completion == "score"


def test_what_is_tried_in_small_keeps_away_from_the_final_test():
    assert make_plan(True, []).sets == (HELD_OUT,) and len(make_plan(True, [4, 5]).seeds) == 1
    assert make_plan(False, [2]).seeds == (2,) and make_plan(False, []).sets == tuple(SETS)


def test_a_run_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="phase1-2: no checkpoint; remove it"):
        Plan(tmp_path).policy("phase1", 2)


def test_an_end_is_the_policys_own_if_it_says_so_and_small_print_counts_alone():
    stats = figures_of(
        [
            line(1, type="small print", judge_mean=1.0, crops_mean=2.0),
            line(2, type="small print", end="forced"),
            line(3, judge_mean=1.0, end="declined"),
            line(4, judge_mean=None, end="context"),
        ]
    )
    assert (stats["small_print"], stats["own_ends"], stats["crops"]) == (0.5, 0.25, 0.5)
    assert stats["judge"] == pytest.approx(2 / 3)


def test_phase_2_is_compared_with_the_phase_1_of_its_own_seed(tmp_path):
    plan = Plan(tmp_path, seeds=(1, 2), sets=(HELD_OUT,))
    scores = {(START, 0): 0.0, ("phase1", 1): 0.25, ("phase1", 2): 0.5}
    scores |= {("phase2", 1): 0.5, ("phase2", 2): 1.0}
    for (name, seed), score in scores.items():
        write_lines(plan.measured(name, seed, HELD_OUT), line(1, judge_mean=score))
    by_arm = summarise(plan)["sets"][HELD_OUT]
    assert changes_of(by_arm, "phase1", "judge") == {1: 0.25, 2: 0.5}
    assert changes_of(by_arm, "phase2", "judge") == {1: 0.25, 2: 0.5}
    assert changes_of(by_arm, "phase2-shuffled", "judge") == {}


def test_the_page_is_what_the_results_say():
    results = json.loads((RESULTS / "phases_evidence.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == tables(results)
