"""Compare an estimate with real runs, and check the origin of its rates."""

from __future__ import annotations

import pytest
from rich.console import Console

from synth.report.estimate import TOKENS_PER_S, Rates, estimate, measured_rates, plan
from synth.storage.stats import CallStats, StageStats
from synth.storage.store import StageFolder
from tests.kits.synth import driver
from tests.kits.synth.output import config, make_run, write_stage


def rendered(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def write_finished_stage(folder, stage, seconds, records=100, **counts):
    """Write a finished stage whose process reports that it took so long."""
    stage_folder = StageFolder(folder, stage)
    write_stage(stage_folder, [[{"source_id": "a"}]])
    stats = StageStats(records_in=records, **counts)
    stats.started -= seconds
    stats.cpu_before -= seconds / 2
    stats.flush(stage_folder, every_s=0)


def test_rates_are_measured_on_finished_stages_and_given_ones_go_first(tmp_path):
    write_finished_stage(
        tmp_path, "generate_128", 10, teacher={"choices": 800, "completion_tokens": 20_000}
    )
    write_finished_stage(tmp_path, "score_select_best", 20, metricx=CallStats(samples=800))
    rates = measured_rates([tmp_path / "none", tmp_path])
    assert rates.tokens == pytest.approx(2000, rel=0.01)
    assert rates.scores == pytest.approx(40, rel=0.01)
    assert rates.verdicts is None
    assert dict(rates.driver)["score_select_best"] == pytest.approx(0.1, rel=0.05)
    over = Rates(tokens=5.0, verdicts=7.0).over(rates)
    assert (over.tokens, over.scores, over.verdicts) == (5.0, rates.scores, 7.0)


def test_a_stage_that_found_its_answers_kept_says_nothing_of_a_rate(tmp_path):
    write_finished_stage(
        tmp_path, "score_select_best", 2, metricx=CallStats(samples=100), answers_kept=900
    )
    assert measured_rates([tmp_path]).scores is None


def test_an_unfinished_stage_says_nothing_of_a_rate(tmp_path):
    write_finished_stage(tmp_path, "score_select_best", 2, metricx=CallStats(samples=100))
    folder = StageFolder(tmp_path, "score_select_best")
    folder.set_manifest({"stage": folder.name, "digest": "", "shards": 2})
    assert measured_rates([tmp_path]).scores is None


def test_whoever_takes_longest_binds_a_stage(tmp_path):
    cfg = config(tmp_path, data={"sample_pool_size": 1000, "target_examples_total": 50})
    costs = {cost.stage: cost for cost in plan(cfg).costs}
    prefilter = costs["prefilter_score"]
    assert plan(cfg, Rates(1000.0, 1e6)).binds(prefilter)[0] == "teacher"
    slow = plan(cfg, Rates(1e9, 2.0))
    assert slow.binds(prefilter) == ("MetricX", 2000 / 2.0 / 3600)
    cpu = plan(cfg, Rates(1e9, 1e9, driver=(("prefilter_score", 3.6),)))
    assert cpu.binds(prefilter) == ("driver", 1.0)
    assert plan(cfg).hours(prefilter)["MetricX"] is None
    assert plan(cfg).rates.tokens == TOKENS_PER_S


def test_what_nobody_knows_is_asked_for_and_never_left_out_of_the_sum_in_silence(tmp_path):
    judged = {"filters": {"llm_judge": {"enabled": True}}}
    text = rendered(estimate(config(tmp_path, **judged)))
    assert "at least" in text and "--scores-per-s" in text and "--verdicts-per-s" in text
    text = rendered(estimate(config(tmp_path, **judged), Rates(100.0, 10.0, 10.0)))
    assert "at least" not in text and "--scores-per-s" not in text
    assert "MetricX binds" in text or "teacher binds" in text


def test_the_rates_of_a_dry_run_are_taken(tmp_path):
    cfg = config(tmp_path / "run")
    dry = tmp_path / "run-dry-run"
    make_run(dry)
    write_finished_stage(dry, "score_select_best", 20, metricx=CallStats(samples=800))
    assert "40 scores/s" in rendered(estimate(cfg))


def test_the_disk_of_a_real_run_is_estimated_within_a_factor_of_two(undisturbed, teacher, metricx):
    cfg = driver.config(
        undisturbed,
        teacher,
        metricx,
        data__sample_pool_size=len(driver.TEXTS),
        bucketing__boundaries=[0, 20],
        final_generation__blob={"blob_ratio": 0},
        filters__llm_judge={"enabled": False},
    )
    estimated = plan(cfg)
    names = ("prefilter_score", "select_sources", "score_select_best")
    estimated_bytes = sum(cost.disk_bytes for cost in estimated.costs if cost.stage in names)
    files = [p for name in names for p in (undisturbed / "stages" / name).rglob("*.zst")]
    real = sum(path.stat().st_size for path in files)
    answers = (undisturbed / "answers.sqlite").stat().st_size
    assert 0.4 < estimated_bytes / real < 2.5 and 0.4 < estimated.answers_bytes / answers < 2.5, (
        estimated_bytes,
        real,
        estimated.answers_bytes,
        answers,
    )
