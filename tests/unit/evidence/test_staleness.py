"""Check the evidence on staleness: its arms, its stats, and the page of its results."""

from __future__ import annotations

import json

import pytest

from bench.common import RESULTS
from evidence.staleness.arms import ARMS, CONTROLS, FRESH, LAST, UPDATES, make_plan
from evidence.staleness.report import (
    BEGIN,
    CHRF,
    END,
    METRICX,
    PAGE,
    runs_by_arm,
    tables,
    verdict,
)
from evidence.staleness.summary import staleness_of
from evidence.translation.arms import CONFIG, overrides
from scorekit.config import load_config
from trainer.translation.config import TranslationConfig


def config_of(name):
    """Return the config of a run as its process reads it, without the addresses of services."""
    plan = make_plan(False, [], [1])
    urls = [f"reward.{service}_urls=http://127.0.0.1:1" for service in ("metricx", "xcomet")]
    settings = [*overrides(plan.arms[name], 1, plan.folder / name, plan), *urls]
    return load_config(TranslationConfig, CONFIG, settings).model_dump(mode="json")


def settings_that_differ(first, second):
    """Return the keys whose values differ in two configs, without the folder of the run."""
    first, second = (dict(flat("", config)) for config in (first, second))
    assert first.keys() == second.keys()
    return {key for key in first if first[key] != second[key]} - {"misc.run_dir"}


def flat(prefix, config):
    """Yield the dotted keys of a config with their values."""
    for key, value in config.items():
        name = f"{prefix}.{key}".strip(".")
        if isinstance(value, dict):
            yield from flat(name, value)
        else:
            yield name, value


def results_of(ends):
    """Return results with these final chrF.

    ends: arm -> seed -> chrF; MetricX is the same.
    """
    stats = {"bleu": 1.0, "xcomet_score": 0.5, "tokens": 7.0}
    start = {"update": 0, "chrf": 10.0, "metricx_score": 20.0, **stats}
    log = [log_line(age) for age in (0, 1)]
    return {
        "sources": 400,
        "held_out": "final_test.jsonl",
        "updates": 24,
        "machine": {"commit": "abc"},
        "start": start,
        "runs": [
            {
                "arm": name,
                "seed": seed,
                "kl": 0.1,
                "curve": [start, {**start, "update": 24, "chrf": chrf, "metricx_score": chrf}],
                "staleness": staleness_of(log),
            }
            for name, by_seed in ends.items()
            for seed, chrf in by_seed.items()
        ],
    }


def log_line(age, **other):
    line = {
        "staleness_mean": age,
        "staleness_max": age,
        "sampler_gap_mean": 0.25,
        "importance_weight_mean": 1.0,
        "importance_capped_frac": 0.0,
        "importance_masked_frac": 0.0,
        "clip_frac": 0.0,
        "reward_coverage": 1.0,
        "dropped_stale": 0,
    }
    return line | other


def test_one_seed_of_the_main_arms_runs_first():
    runs = make_plan(False, [], [1, 2, 3]).runs
    main = [name for name in ARMS if name not in LAST]
    assert [*runs[: len(main)]] == [(name, 1) for name in main]
    assert len(set(runs)) == len(runs) == 3 * len(ARMS)
    assert {name for name, _ in runs[-3 * len(LAST) :]} == set(LAST)


def test_a_quick_plan_has_a_batch_of_the_largest_age():
    plan = make_plan(True, [], [1])
    assert plan.updates > 4 and ("stale-4", 1) in plan.runs
    assert plan.folder != make_plan(False, [], [1]).folder


@pytest.mark.parametrize("quick", [False, True])
def test_the_checkpoints_that_are_measured_are_kept(quick):
    plan = make_plan(quick, [], [1])
    settings = dict(setting.split("=", 1) for setting in plan.settings)
    every = int(settings["misc.save_every_n_updates"])
    saved = list(range(every, plan.updates + 1, every))
    stored = saved[-int(settings["misc.keep_checkpoints"]) :]
    assert {step for part in plan.measured for step in part} <= set(stored)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("stale-1", {"rl.max_staleness"}),
        ("stale-4", {"rl.max_staleness"}),
        ("stale-4-mask", {"rl.max_staleness", "rl.importance_mode"}),
        ("stale-0-shuffled", set()),
    ],
)
def test_an_arm_differs_from_fresh_samples_in_nothing_but_its_question(name, keys):
    assert settings_that_differ(config_of(FRESH), config_of(name)) == keys


def test_a_control_has_the_settings_of_its_arm():
    for name in (FRESH, "stale-1", "stale-4"):
        assert settings_that_differ(config_of(name), config_of(CONTROLS[name])) == set()
        assert ARMS[CONTROLS[name]].shuffled and not ARMS[name].shuffled


def test_every_arm_corrects_the_importance():
    rl = config_of(FRESH)["rl"]
    assert (rl["importance_correction"], rl["num_updates"]) == ("auto", UPDATES)


def test_a_mean_over_updates_leaves_out_those_without_a_value():
    first = log_line(0, importance_capped_frac=0.1, importance_masked_frac=0.0)
    skipped = log_line(None, importance_capped_frac=None, dropped_stale=3)
    last = log_line(4, importance_capped_frac=0.3, importance_masked_frac=0.2)
    stats = staleness_of([first, skipped, last, log_line(4, importance_capped_frac=0.2)])
    assert stats["staleness_mean"] == pytest.approx(8 / 3)
    assert (stats["staleness_max"], stats["dropped_stale"]) == (4, 3)
    assert stats["importance_capped_frac"] == pytest.approx(0.2)
    assert (stats["capped_max"], stats["masked_max"]) == (0.3, 0.2)
    assert stats["updates_by_age"] == {"0": 1, "4": 2}


FALLS = {
    FRESH: {1: 15.0, 2: 17.0, 3: 16.0},
    "stale-1": {1: 15.5, 2: 16.0, 3: 16.5},
    "stale-4": {1: 13.0, 2: 15.1, 3: 13.9},
    "stale-0-shuffled": {1: 10.0, 2: 12.1, 3: 10.9},
    "stale-4-shuffled": {1: 8.0, 2: 16.0, 3: 19.0},
}


def test_the_sentence_tells_a_difference_from_the_spread_of_the_seeds():
    text = verdict(runs_by_arm(results_of(FALLS)), CHRF)
    assert text.startswith("**chrF.** Above its control, clear of 0 over the seeds: *max_stal")
    above = text.partition("seeds: ")[2].partition(".")[0]
    assert above == "*max_staleness 0*"  # 1 has no control in these results
    of_1, of_4 = text.split("less *max_staleness 0*: ")[1:]
    assert of_1.startswith("+0.00 [") and "within the seeds' spread" in of_1
    assert of_4.startswith("-2.00 [-2.25, -1.75], clear of 0")


def test_less_metricx_is_more_reward():
    runs = runs_by_arm(results_of({FRESH: {1: 15.0}}))
    assert METRICX.changes(runs[FRESH]) == {1: 5.0}
    assert CHRF.changes(runs[FRESH]) == {1: 5.0}
    worse = runs_by_arm(results_of({FRESH: {1: 22.0}}))
    assert METRICX.changes(worse[FRESH]) == {1: -2.0}


def test_one_seed_decides_nothing():
    text = verdict(runs_by_arm(results_of({FRESH: {1: 15.0}, "stale-4": {1: 1.0}})), CHRF)
    assert text == "**chrF.** Above its control, clear of 0 over the seeds: none."


def test_the_sentence_says_what_the_tables_say():
    results = results_of(FALLS)
    text = tables(results)
    assert "-2.00 [-2.25, -1.75], clear of 0" in verdict(runs_by_arm(results), CHRF)
    assert "| -2.00 [-2.25, -1.75]: clear of 0 |" in text
    assert "| max_staleness 4 | 3 | 14.00 | 13.00, 15.10, 13.90 |" in text


def test_a_control_is_in_no_table_of_changes():
    rows = tables(results_of(FALLS)).splitlines()
    assert sum(row.startswith("| 4, shuffled (control) |") for row in rows) == 1  # its ends
    assert sum(row.startswith("| max_staleness 4 |") for row in rows) == 4


def test_the_page_holds_what_the_results_say():
    results = json.loads((RESULTS / "staleness.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert tables(results) in page.partition(BEGIN)[2].partition(END)[0]
