"""Check texts that make a service fail: they stay open or are given up, and stop no others."""

from __future__ import annotations

import json

import pytest
import structlog
import structlog.testing

from scorekit.errors import ScorekitError
from synth.execution.stage import StageIncomplete
from synth.report.estimate import status
from synth.storage.store import StageFolder
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI, _BrokenOff, _error
from tests.kits.synth import output as output_kit
from tests.kits.synth.driver import STAGES, TEXTS, config, korean, run, write_sources

PREFILTER = STAGES[:1]
#: More than may fail in a row, and all that remains when the others are answered.
POISON = [f"number {i} " for i in range(12)]


class FailingServer(FakeOpenAI):
    """A server that fails for those texts.

    failure: a status, or "close".
    """

    failure: int | str = 500

    def _answer(self, body, record):
        if any(text in body["messages"][-1]["content"] for text in POISON):
            if self.failure == "close":
                return _BrokenOff(b"{", headers={"content-length": "9999"})
            return _error(self.failure, f"words of a server {body}")
        return super()._answer(body, record)


@pytest.fixture
def failing_server():
    fake = FailingServer(respond=korean)
    with fake.running() as fake.url:
        yield fake


@pytest.mark.parametrize("failure", [500, 429, "close"])
def test_many_texts_that_the_teacher_cannot_bear_stay_open_and_can_be_given_up(
    tmp_path,
    failing_server,
    metricx,
    failure,
):
    failing_server.failure = failure
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, failing_server, metricx)
    with structlog.testing.capture_logs() as logged:
        for resume in (False, True):  # in the second run only they remain
            with pytest.raises(StageIncomplete, match="12 records are left open"):
                run(cfg, stages=PREFILTER, resume=resume)
    open_lines = [line for line in logged if line["event"] == "open"]
    assert len(open_lines) == 24 and "words of a server" not in str(logged)
    assert {line["status"] for line in open_lines} == {None if failure == "close" else failure}
    assert f"{PREFILTER[0].name}: 12 left open (teacher_" in output_kit.printed(status(tmp_path))
    run(cfg, stages=PREFILTER, resume=True, give_up=True)
    folder = StageFolder(tmp_path, "prefilter_score")
    assert len(list(folder.all_rejected())) == 12 and len(list(folder.records())) == 8
    assert "left open" not in output_kit.printed(status(tmp_path))


def test_texts_that_are_refused_do_not_stop_what_is_left_of_a_shard(
    tmp_path, failing_server, metricx
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, failing_server, metricx)
    with pytest.raises(StageIncomplete):
        run(cfg, stages=PREFILTER)
    failing_server.failure = 400
    run(cfg, stages=PREFILTER, resume=True)
    rejected = list(StageFolder(tmp_path, "prefilter_score").all_rejected())
    assert [r["reason_code"] for r in rejected] == ["teacher_refused"] * 12


def test_a_source_that_was_too_long_is_asked_for_again_where_the_stage_is(
    tmp_path,
    metricx,
):
    fake = FakeOpenAI(respond=korean)
    fake.context_length = 100
    with fake.running() as fake.url:
        write_sources(tmp_path, TEXTS)
        cfg = config(tmp_path, fake, metricx)
        fake.context_length = 100
        run(cfg, stages=PREFILTER)
        rejected = list(StageFolder(tmp_path, "prefilter_score").all_rejected())
        assert [r["reason_code"] for r in rejected] == ["teacher_overlong"] * 20
        fake.context_length = None  # restarted with a larger --max-model-len
        run(cfg, stages=PREFILTER, overwrite=True)
        assert len(list(StageFolder(tmp_path, "prefilter_score").records())) == 20


def test_many_pairs_that_the_judges_llm_cannot_bear_stay_open_and_can_be_given_up(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("synth.execution.clients.FAILURES_IN_A_ROW", 3)

    class Judged(FakeOpenAI):
        def _answer(self, body, record):
            easy = "Good morning." in json.dumps(body)
            return super()._answer(body, record) if easy else _error(500, "no")

    llm = Judged(respond=lambda *_: '{"pass": true, "reason_code": "ok", "notes": ""}')
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        output_kit.make_run(tmp_path)
        filters = {"rule_based": False, "llm_judge": {"enabled": True, "url": url}}
        cfg = output_kit.config(tmp_path, filters=filters)
        cfg.teacher.retry.backoff_s = [0.01]
        with pytest.raises(StageIncomplete, match=r"10 records are left open"):
            output_kit.run_filter(cfg)
        llm.fail(503, times=None)  # now no request is answered
        with pytest.raises(ExceptionGroup) as error_info:
            output_kit.run_filter(cfg, resume=True)
        assert error_info.group_contains(
            ScorekitError, match="the judge failed 3 requests in a row"
        )
        llm.well()
        progress = output_kit.run_filter(cfg, resume=True, give_up=True)
    assert progress.stats.rejected.total() == 10
