"""Check what a rule cannot decide: an LLM judge decides, and no doubt passes silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import synth.execution.clients
from scorekit.errors import ScorekitError, UserError
from synth.report.page import write_report
from synth.storage.stats import count_stage
from synth.storage.store import StageFolder, read_records
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from tests.kits.synth.output import (
    config,
    make_run,
    run_export,
    run_filter,
    stats_of,
    train,
    write_stage,
)

ROOT = Path(__file__).parents[4]
HOLIDAY = (
    "도서관은 12월 25일에 문을 닫는다고 알렸다.",
    "They said it closes on Christmas Day.",
)
WRONG = ("이번이 3번째 방문이라고 그가 말했다.", "He said that this was his fourth visit.")
SURE = (
    "이 다리는 2019년에 처음으로 문을 열었다.",
    "This bridge was opened for the first time in 2091.",
)
FINE = (
    "이 다리는 2019년에 처음으로 문을 열었다고 한다.",
    "They say this bridge first opened in 2019.",
)
PAIRS = (HOLIDAY, WRONG, SURE, FINE)


def reader(body, seed):
    """Return an LLM that knows Christmas, and that three is not four."""
    text = body["messages"][-1]["content"]
    passed = "fourth" not in text
    return json.dumps({"pass": passed, "reason_code": "ok" if passed else "meaning", "notes": "x"})


@pytest.fixture
def llm():
    return FakeOpenAI("teacher", respond=reader)


def filtered(folder, judge, pairs=PAIRS, **more):
    """Return the config of a run whose best candidates are these pairs, up to format_filter."""
    records = make_run(folder, count=len(pairs), chatter=0)[: len(pairs)]
    best = [{"index": 0, "text": mt, "score": 1.0} for _, mt in pairs]
    candidates = [
        {**r, "source_text": src, "topk": [candidate]}
        for r, (src, _), candidate in zip(
            StageFolder(folder, "score_select_best").records(), pairs, best, strict=True
        )
    ]
    assert len(records) == len(candidates)
    write_stage(StageFolder(folder, "score_select_best"), [candidates])
    data = {"src_lang": "ko", "tgt_lang": "en"}
    return config(folder, data=data, filters={"llm_judge": judge, **more})


def outcomes(cfg):
    """Return (source of each accepted record, code of each rejected one by source)."""
    folder = StageFolder(cfg.run.out_dir, "format_filter")
    accepted = [record["source_text"] for record in folder.records()]
    rejected = [r for i in range(folder.shards()) for r in read_records(folder.rejected(i))]
    return accepted, {record["source_text"]: record["reason_code"] for record in rejected}


def test_a_judge_decides_about_doubts_and_the_report_counts_them(tmp_path, llm):
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        cfg = filtered(tmp_path, {"enabled": True, "url": url})
        progress = run_filter(cfg)
    assert outcomes(cfg) == (
        [HOLIDAY[0], FINE[0]],
        {WRONG[0]: "doubt_refused:numbers_missing", SURE[0]: "numbers_missing"},
    )
    assert progress.stats.judge.samples == 3  # a certain case costs no verdict
    counts = count_stage(StageFolder(tmp_path, "format_filter"))
    assert counts.told == {"doubt_passed:numbers_missing": 1}
    holiday, fine = StageFolder(tmp_path, "format_filter").records()
    assert holiday["filters"]["doubtful"] == {"numbers_missing": "12, 25"}
    assert "doubtful" not in fine["filters"]
    stats_of(cfg, "format_filter", progress.stats)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("doubt_passed:numbers_missing") and "the judge refused it" in page
    run_export(cfg)
    assert [row["target_text"] for row in train(cfg)] == [HOLIDAY[1], FINE[1]]


@pytest.mark.parametrize("has_llm", [True, False])
def test_a_short_text_that_looks_like_another_language_is_a_doubt(tmp_path, llm, has_llm):
    true, french = ("혈관 나이", "Vascular age"), ("네 번째 방문", "La visite fourth du jour")
    short = (true, french)
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        judge = {"enabled": True, "url": url} if has_llm else {"enabled": False}
        cfg = filtered(tmp_path, judge, short)
        run_filter(cfg)
    assert outcomes(cfg) == (
        ([true[0]], {french[0]: "doubt_refused:wrong_language"})
        if has_llm
        else ([], {src: "wrong_language" for src, _ in short})
    )


@pytest.mark.parametrize("has_llm", [True, False])
def test_a_copied_name_is_a_doubt(tmp_path, llm, has_llm):
    name, copy = ("Microsoft Office 365",) * 2, ("Save all of the files",) * 2
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        judge = {"enabled": True, "url": url} if has_llm else {"enabled": False}
        cfg = filtered(tmp_path, judge, (name, copy))
        run_filter(cfg)
    accepted, code_by_source = outcomes(cfg)
    assert accepted == ([name[0]] if has_llm else [])
    assert code_by_source[copy[0]] == "copied_source"
    if has_llm:
        notes = count_stage(StageFolder(tmp_path, "format_filter")).told
        assert notes == {"doubt_passed:copied_source": 1}


def test_a_judge_that_fails_leaves_a_doubt_open_and_is_asked_again(tmp_path, llm, monkeypatch):
    monkeypatch.setattr(synth.execution.clients, "FAILURES_IN_A_ROW", 2)
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        cfg = filtered(tmp_path, {"enabled": True, "url": url})
        cfg.teacher.retry.backoff_s = [0.01]
        llm.fail(503, times=None)
        with pytest.raises(ExceptionGroup) as error_info:
            run_filter(cfg)
        assert error_info.group_contains(
            ScorekitError, match="the judge failed 2 requests in a row"
        )
        assert not StageFolder(tmp_path, "format_filter").done()
        llm.well()
        run_filter(cfg, resume=True)
    assert outcomes(cfg)[0] == [HOLIDAY[0], FINE[0]]


@pytest.mark.parametrize(
    ("policy", "num_accepted", "code"),
    [("conservative", 0, "judge_error:invalid_input"), ("permissive", 1, "numbers_missing")],
)
def test_a_judge_that_cannot_read_a_pair_accepts_no_doubt(
    tmp_path, llm, policy, num_accepted, code
):
    judge = {"enabled": True, "fail_policy": policy}
    with (
        llm.running() as upstream,
        running_judge(upstream=upstream, max_field_chars=3) as url,  # an error for every sample
    ):
        cfg = filtered(tmp_path, {**judge, "url": url}, (HOLIDAY, FINE))
        run_filter(cfg)
    passed, code_by_source = outcomes(cfg)
    assert len(passed) == num_accepted and code_by_source[HOLIDAY[0]] == code


def test_without_a_judge_that_reads_meaning_the_rule_decides_alone(tmp_path):
    moved = ("참가자 30명 가운데 12명이 여자였다고 한다.", "Twelve of the 30 were women, they say.")
    pairs = (HOLIDAY, moved, FINE)
    with running_judge() as url:  # a judge of rules
        for judge in ({"enabled": False}, {"enabled": True, "url": url}):
            folder = tmp_path / str(judge["enabled"])
            folder.mkdir()
            cfg = filtered(folder, judge, pairs)
            run_filter(cfg)
            assert outcomes(cfg) == ([moved[0], FINE[0]], {HOLIDAY[0]: "numbers_missing"})
            counts = count_stage(StageFolder(folder, "format_filter"))
            assert counts.told == {"doubt_unjudged:numbers_missing": 1}


def test_a_rubric_for_doubts_is_told_what_the_rule_saw(tmp_path, llm):
    rubrics = ROOT / "configs/synth/rubrics"
    task = {"enabled": True, "doubt_task": "translation_doubt"}
    with llm.running() as upstream, running_judge(upstream=upstream, rubrics=rubrics) as url:
        cfg = filtered(tmp_path, {**task, "url": url}, (HOLIDAY, FINE))
        run_filter(cfg)
    prompts = [request.body["messages"][-1]["content"] for request in llm.requests]
    assert sorted("could not match" in text for text in prompts) == [False, True]
    assert any("12, 25" in text for text in prompts)
    assert outcomes(cfg)[0] == [HOLIDAY[0], FINE[0]]
    with running_judge() as url, pytest.raises(UserError, match="has no rubric 'translation_doubt"):
        run_filter(filtered(tmp_path, {**task, "url": url}, (HOLIDAY,)), overwrite=True)
