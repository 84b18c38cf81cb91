"""Check a teacher that answers with the source itself: none of it is exported."""

from __future__ import annotations

import pytest

from bench.filters import DIRECTIONS, seven
from synth.storage.store import StageFolder
from testing.openai_server import FakeOpenAI
from tests.kits.synth.driver import config, run, write_sources
from tests.kits.synth.output import run_filter

TAGS = {"en": "en-US", "de": "de-DE", "ko": "ko-KR", "zh": "zh-CN"}


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_nothing_is_exported_where_the_teacher_answers_with_the_source(
    tmp_path, metricx, source, target
):
    texts = [row[source] for row in seven() if 10 <= len(row[source]) < 30][:40]

    def echo(body, seed):
        prompt = body["messages"][-1]["content"]
        return max((text for text in texts if text in prompt), key=len)

    write_sources(tmp_path, texts)
    teacher = FakeOpenAI(respond=echo)
    with teacher.running() as url:
        teacher.url = url
        cfg = config(
            tmp_path,
            teacher,
            metricx,
            data__src_lang=TAGS[source],
            data__tgt_lang=TAGS[target],
            data__target_examples_total=len(texts),
            filters__llm_judge={"enabled": False},
            filters__on_reject="next_best",
        )
        run(cfg)
        run_filter(cfg)
    folder = StageFolder(tmp_path, "format_filter")
    assert len(list(StageFolder(tmp_path, "score_select_best").records())) == len(texts)
    assert list(folder.records()) == []
    codes = {rejected["reason_code"] for rejected in folder.all_rejected()}
    assert codes <= {"copied_source", "wrong_script", "wrong_language", "third_script"}
