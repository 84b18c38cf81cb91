"""Check a run's output: pairs, card, views, stats and report. Stages are hand-made folders."""

from __future__ import annotations

import json
import math
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from synth.report.estimate import Rates, estimate, plan, status
from synth.report.page import write_report
from synth.storage.distributions import Distribution
from synth.storage.stats import Exporter, StageStats, scorer_stats
from synth.storage.store import StageFolder, read_records
from testing.servers import free_port, running_service
from tests.kits.synth.output import (
    HOSTILE,
    config,
    gold,
    make_run,
    run_export,
    run_filter,
    stats_of,
    train,
    views_of,
    write_stage,
)


def test_the_filter_asks_a_real_judge_and_minds_one_that_is_away(tmp_path):
    from testing.judge import running_judge

    make_run(tmp_path)
    with running_judge() as url:
        judge = {"enabled": True, "url": url}
        cfg = config(tmp_path, filters={"llm_judge": judge, "rule_based": False})
        progress = run_filter(cfg)
    assert progress.stats.judge.samples == 10
    assert progress.stats.rejected == {"judge:meta_phrase": 2}
    first_record = next(StageFolder(tmp_path, "format_filter").records())
    assert first_record["filters"] == {
        "passed": [],
        "failed": [],
        "tried": [],
        "judge": {"pass": True, "reason_code": "ok", "notes": ""},
    }
    run_export(cfg)
    assert train(cfg)[0]["selection"]["filters"]["judge"]["outcome"] == "pass"
    with pytest.raises(UserError, match="is the rules backend"), running_judge() as url:
        judge_settings = {"enabled": True, "url": url, "model": "another"}
        run_filter(config(tmp_path, filters={"llm_judge": judge_settings}), overwrite=True)
    strict = config(tmp_path, filters={"llm_judge": {**judge, "fail_policy": "conservative"}})
    lenient = config(tmp_path, filters={"llm_judge": {**judge, "fail_policy": "permissive"}})
    with running_judge(max_field_chars=3) as url:  # an error for every sample
        strict.filters.llm_judge.url = lenient.filters.llm_judge.url = url
        (tmp_path / "answers.sqlite").unlink()  # the verdicts so far
        stats = run_filter(strict, overwrite=True).stats
        assert stats.rejected == {"judge_error:invalid_input": 8, "meta_phrase": 2}
        stats = run_filter(lenient, overwrite=True).stats
        assert stats.records_out == 8 and stats.rejected == {"meta_phrase": 2}


def test_views_join_the_shards_in_order(done):
    out_dir = done.run.out_dir
    for stage in ("prefilter_score", "score_select_best", "format_filter"):
        views_of(done, stage)
    prefiltered = list(read_records(out_dir / "prefilter_candidates.jsonl"))
    assert prefiltered == list(StageFolder(out_dir, "prefilter_score").records())
    assert len(list(read_records(out_dir / "final_candidates_topk.jsonl"))) == 10
    rejected = list(read_records(out_dir / "rejected.jsonl"))
    assert [(r["stage"], r["reason_code"]) for r in rejected] == [
        ("select_sources", "not_selected"),
        ("select_sources", "not_selected"),
        ("format_filter", "meta_phrase"),
        ("format_filter", "meta_phrase"),
    ]
    before = (out_dir / "rejected.jsonl").read_bytes()
    views_of(done, "format_filter")
    assert (out_dir / "rejected.jsonl").read_bytes() == before
    assert not list(out_dir.glob(".*.tmp"))


def test_stored_candidates_stay_out_of_the_view_of_the_best(done):
    folder = StageFolder(done.run.out_dir, "score_select_best")
    write_stage(folder, [[{**r, "candidates": [1, 2]} for r in folder.records()]])
    views_of(done, "score_select_best")
    view = read_records(done.run.out_dir / "final_candidates_topk.jsonl")
    assert all("topk" in record and "candidates" not in record for record in view)


def test_no_view_of_a_stage_of_which_shards_are_missing(tmp_path):
    cfg = config(tmp_path)
    make_run(tmp_path)
    run_filter(cfg, num_shards=2)
    assert views_of(cfg, "format_filter") == []
    assert not (tmp_path / "rejected.jsonl").exists()


def test_stats_count_records_by_marks_and_add_up_what_processes_called(done):
    out_dir = done.run.out_dir
    folder = StageFolder(out_dir, "format_filter")
    killed = StageStats()  # a process that was killed before it counted its records
    killed.judge.requests, killed.judge.samples, killed.records_in = 3, 30, 5
    killed.teacher = {"requests": 4, "retries": 1, "failures": 0, "completion_tokens": 90}
    killed.flush(folder, every_s=0)
    called = StageStats()
    called.judge.requests = 2
    called.teacher = {"requests": 6, "retries": 0, "failures": 2, "completion_tokens": 10}
    stats = stats_of(done, "format_filter", called)
    assert stats == json.loads((out_dir / "stats.json").read_text())
    stage = stats["stages"]["format_filter"]
    assert (stage["records_in"], stage["records_out"], stage["rejected"]) == (
        10,
        8,
        {"meta_phrase": 2},
    )
    assert stage["judge"]["requests"] == 5
    assert stage["teacher"] == {
        "requests": 10,
        "retries": 1,
        "failures": 2,
        "completion_tokens": 100,
    }
    assert stage["processes"] == 3  # the run itself, and these two
    assert stats["stages"]["sample_sources"]["rejected"] == {"duplicate": 8, "not_sampled": 20}
    lengths = stage["distributions"]["target_chars"]
    targets = [len(row["target_text"]) for row in train(done)]
    assert (lengths["n"], lengths["p0"], lengths["p100"]) == (8, min(targets), max(targets))
    assert sum(lengths["counts"]) == 8
    assert stage["distributions"]["judge"] == {"not asked": 8}
    improvement = stats["stages"]["prefilter_score"]["distributions"]["improvement"]
    assert (improvement["p0"], improvement["p100"]) == (-0.75, 2.0)
    assert stats["stages"]["score_select_best"]["distributions"]["candidates_out"] == {"cut": 10}


def test_a_judge_that_failed_is_counted_apart_among_the_kept(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    records = list(folder.records())
    records[0]["filters"]["judge"] = {"error": "upstream"}
    records[1]["filters"]["judge"] = {"pass": True, "reason_code": "ok", "notes": ""}
    write_stage(folder, [records], [{**records[0], "reason_code": "judge_error:timeout"}])
    stage = stats_of(done, "format_filter")["stages"]["format_filter"]
    assert stage["rejected"] == {"judge_error:timeout": 1}
    assert stage["distributions"]["judge"] == {"error:upstream": 1, "not asked": 6, "pass": 1}
    run_export(done, overwrite=True)
    outcomes = [row["selection"]["filters"]["judge"] for row in train(done)]
    assert outcomes[0] == {"outcome": "error", "reason_code": "", "notes": "", "error": "upstream"}
    assert [o["outcome"] for o in outcomes] == ["error", "pass", *["not_asked"] * 6]


@given(st.lists(st.floats(-25, 25), min_size=1, max_size=300))
def test_a_spread_has_all_values_in_its_bars_and_true_quantiles(values):
    spread = Distribution(0.01)
    for value in values:
        spread.add(value)
    fields = spread.as_dict()
    assert sum(fields["counts"]) == fields["n"] == len(values)
    assert len(fields["edges"]) == len(fields["counts"]) + 1 <= 42
    assert fields["edges"][0] <= fields["p0"] and fields["p100"] <= fields["edges"][-1]
    ranked = sorted(values)
    for share in (10, 50, 90):
        exact = ranked[max(1, math.ceil(share / 100 * len(ranked))) - 1]
        assert abs(fields[f"p{share}"] - exact) <= 0.0051
    assert abs(fields["mean"] - sum(values) / len(values)) < 1e-3


def test_a_spread_of_nothing_is_nothing():
    assert Distribution().as_dict() is None


def test_a_stage_that_was_made_anew_is_read_anew(done):
    stats_of(done, "format_filter")
    folder = StageFolder(done.run.out_dir, "format_filter")
    write_stage(folder, [list(folder.records())[:2]])
    stages = stats_of(done, "format_filter")["stages"]
    assert stages["format_filter"]["distributions"]["target_chars"]["n"] == 2


def test_figures_are_written_now_and_then_and_go_with_their_stage(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    stats = StageStats()
    stats.flush(folder)
    stats.records_in = 9
    stats.flush(folder)  # too soon
    written = folder.path / f"stats-{stats.process}.json"
    assert json.loads(written.read_bytes())["records_in"] == 0
    stats.flush(folder, every_s=0)
    assert json.loads(written.read_bytes())["records_in"] == 9
    run_filter(done, overwrite=True)
    assert not written.exists()


def test_the_scorer_tells_of_its_batches_and_memory():
    with running_service(FakeBackend("metricx")) as url:
        for sample in ({"src": "one", "mt": "하나"}, {"src": "two", "mt": "둘"}):
            before = scorer_stats(url, {})
            httpx.post(f"{url}/v1/score", json={"samples": [sample]}).raise_for_status()
        assert before["batches"] >= 1
        after = scorer_stats([url], before)
        anew = scorer_stats(url, dict.fromkeys(before, 1e9))  # the service was restarted
    assert after["batches"] == 1 and after["batch_samples"] == 1
    assert anew["batches"] == before["batches"] + 1
    assert after["memory_peak_bytes"] > 1e6
    assert scorer_stats("http://127.0.0.1:9", {}) == {}


def test_prometheus_sees_the_stage_at_work_on_loopback_only():
    port = free_port()
    exporter = Exporter(port)
    try:
        stats = StageStats(records_out=3)
        stats.rejected["meta_phrase"] += 2
        exporter.watch("format_filter", stats)
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'synth_records_total{outcome="kept",stage="format_filter"} 3.0' in page
        assert 'outcome="meta_phrase",stage="format_filter"} 2.0' in page
        with pytest.raises(UserError, match="prometheus_port"):
            Exporter(port)
        with pytest.raises(httpx.ConnectError):  # a server on all addresses would answer
            httpx.get(f"http://127.0.0.2:{port}/metrics")
    finally:
        exporter.close()


def test_the_report_shows_funnel_reasons_pictures_and_pairs(done, charts):
    stats_of(done, "format_filter")
    page = write_report(done.run.out_dir).read_text()
    assert page == write_report(done.run.out_dir).read_text()
    assert page.count("<svg") == 6
    for text in ("not_sampled", "meta_phrase", "select_sources", gold(1)[0][1][:20], "번역:"):
        assert text in page
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=[\"']?https?:|url\(['\"]?https?:|@import", page)


def test_hostile_texts_are_shown_and_not_obeyed(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    records = [{**r, "source_text": HOSTILE, "target_text": HOSTILE} for r in folder.records()]
    rejected = [{**records[0], "reason_code": "tag", "reason": HOSTILE}]
    write_stage(folder, [records], rejected)
    page = write_report(done.run.out_dir).read_text()
    assert "<img src=x" not in page and "\x1b" not in page
    assert "&lt;img src=x" in page and "␛[2J" in page


def test_a_report_of_a_run_that_has_only_begun(tmp_path, charts):
    with pytest.raises(UserError, match="no run here"):
        write_report(tmp_path)
    make_run(tmp_path)
    assert "sample_sources" in write_report(tmp_path).read_text()


def _printed_text(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_status_tells_shards_counts_and_the_time_left(tmp_path):
    with pytest.raises(UserError, match="no run here"):
        status(tmp_path)
    cfg = config(tmp_path)
    make_run(tmp_path)
    stats = run_filter(cfg, num_shards=3).stats
    stats.began, stats.started = stats.began - 8, stats.started - 8
    stats.flush(StageFolder(cfg.run.out_dir, "format_filter"), every_s=0)
    lines = {
        line.split("│")[1].strip(): line
        for line in _printed_text(status(tmp_path)).splitlines()
        if line.startswith("│")
    }
    row = [cell.strip() for cell in lines["format_filter"].split("│")]
    assert row[2:6] == ["1 of 3", "4", "3", "1"]
    assert row[7] in ("0:00:12", "0:00:11", "0:00:13")  # 6 remaining, at 4 in 8 s
    assert "done" in lines["select_sources"]
    assert "–" in lines["export"]


def test_an_estimate_counts_requests_sequences_and_tokens(tmp_path):
    cfg = config(
        tmp_path,
        data={"sample_pool_size": 1000, "target_examples_total": 50},
        final_generation={"num_candidates": 128},
    )
    costs = {cost.stage: cost for cost in plan(cfg, Rates(1000.0)).costs}
    assert costs["prefilter_score"].requests == costs["prefilter_score"].scored == 2000
    assert costs["generate_128"].requests == 50 * 4
    assert costs["generate_128"].sequences == costs["score_select_best"].scored == 6400
    assert costs["format_filter"].judged == 0
    assert costs["generate_128"].tokens_out > costs["generate_128"].tokens_in
    estimated = plan(cfg, Rates(1000.0))
    assert (
        estimated.hours(costs["generate_128"])["teacher"]
        == costs["generate_128"].tokens_out / 3.6e6
    )
    assert "generate_128" in _printed_text(estimate(cfg, Rates(1000.0)))
    alone = config(
        tmp_path,
        data={"sample_pool_size": 1000, "target_examples_total": 50},
        final_generation={"num_candidates": 128, "strategy": "per_call"},
    )
    assert plan(alone).costs[3].requests == 6400
    stored = config(tmp_path, final_generation={"num_candidates": 128, "store_candidates": True})
    bare = config(tmp_path, final_generation={"num_candidates": 128})
    assert plan(stored).disk_bytes > plan(bare).disk_bytes


FINE = {
    "segmentation": {"max_chars": 800},
    "teacher": {"max_concurrency": 256, "max_sequences": 1024},
}


WARNINGS = [
    ({"teacher": {"generation": {"max_tokens_blob": 600}}}, "max_tokens_blob 600 cuts"),
    ({"segmentation": {"max_chars": 5000}}, "max_tokens 512 fits"),
    ({"teacher": {"max_concurrency": 32}}, "max_concurrency 32: prefilter_score keeps 32"),
    ({"teacher": {"max_concurrency": 256, "max_sequences": None}}, "2048 sequences in flight"),
    ({"final_generation": {"store_candidates": True}}, "store_candidates keeps"),
    ({"prefilter": {"store_texts": True}}, "store_texts keeps"),
    ({"teacher": {"requests_per_minute": 10}}, "requests_per_minute alone"),
    ({"data": {"target_examples_total": 100, "sample_pool_size": 10}}, "all are selected"),
    ({"data": {"sample_pool_size": 10**12}}, "run.out_dir"),
]


@pytest.mark.parametrize(
    ("sections", "warning"), WARNINGS, ids=[warning[:25] for _, warning in WARNINGS]
)
def test_an_estimate_warns_of_what_will_go_wrong(tmp_path, sections, warning):
    merged = {name: {**FINE.get(name, {}), **sections.get(name, {})} for name in {*FINE, *sections}}
    assert not any(warning in line for line in plan(config(tmp_path, **FINE)).warnings)
    assert any(warning in line for line in plan(config(tmp_path, **merged)).warnings)


def test_an_estimate_warns_of_a_timeout_that_a_slow_server_cannot_keep(tmp_path):
    cfg = config(tmp_path, **FINE)
    assert not any("request_timeout_s" in line for line in plan(cfg, Rates(7500.0)).warnings)
    assert any("request_timeout_s" in line for line in plan(cfg, Rates(50.0)).warnings)
