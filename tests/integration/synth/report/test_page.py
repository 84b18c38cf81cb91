"""Check the report of a run: its services, the fate and reason of each source, and its cost."""

from __future__ import annotations

import html
import json
import random
import re

import pytest

from scorekit.config import save_config
from synth.report.page import Smallest, pick_examples, write_report
from synth.storage.stats import StageStats
from synth.storage.store import StageFolder
from tests.kits.synth.output import (
    HOSTILE,
    config,
    make_run,
    run_export,
    run_filter,
    stats_of,
    write_stage,
)


@pytest.fixture
def done(tmp_path):
    """Return the config of a run whose filter tried the next best candidate."""
    cfg = config(tmp_path / "run", filters={"on_reject": "next_best"})
    cfg.run.out_dir.mkdir()
    make_run(cfg.run.out_dir)
    folder = StageFolder(cfg.run.out_dir, "score_select_best")
    shards = []
    for index in range(folder.shards()):
        shards.append([])
        for record in list(folder.records())[index * 4 : index * 4 + 4]:
            good = {**record["topk"][0], "text": record["topk"][0]["text"].removeprefix("번역: ")}
            second = {**good, "index": 7, "score": good["score"] + 1}
            rescue = index == 0 and record["topk"][0]["text"] != good["text"]
            shards[-1].append({**record, "topk": [*record["topk"], *([second] if rescue else [])]})
    write_stage(folder, shards)
    run_filter(cfg)
    run_export(cfg)
    save_config(cfg, cfg.run.out_dir / "config.yaml")
    return cfg


def page_of(cfg, **stats):
    """Return the page without its tags, and the page itself."""
    called = StageStats()
    for name, value in stats.items():
        setattr(called, name, value)
    stats_of(cfg, "format_filter", called)
    page = write_report(cfg.run.out_dir).read_text()
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split()), page


def test_it_names_pair_teacher_scorer_and_settings(done):
    text, page = page_of(done)
    for expected_text in (
        "English (en-US) → Korean (ko-KR)",
        "served-name",
        "org/metricx-24-tiny, abc123",
        "8 a source, temperature 1",
        "the next best of 2 candidates is tried",
        "num_candidates: 8",
    ):
        assert expected_text in text, expected_text
    assert 'lang="ko-KR"' in page


def test_it_counts_each_type_and_length_through_the_stages(done):
    text, _ = page_of(done)
    rows = re.search(r"By type and length (.*?) Rejections", text)[1]
    accepted = list(StageFolder(done.run.out_dir, "format_filter").records())
    sentences = sum(record["source_type"] == "sentence" for record in accepted)
    assert (
        f"sentences 6 6 5 5 {sentences}" in rows
        and f"blobs 6 6 5 5 {len(accepted) - sentences}" in rows
    )
    assert "10 to 20 tokens" in rows


def test_it_explains_reasons_and_shows_what_was_refused_beside_what_was_kept(done):
    text, _ = page_of(done)
    assert "The translation speaks of itself" in text
    (rejected,) = pick_examples(done.run.out_dir).rejected
    assert rejected["candidate"].startswith("번역:") and rejected["code"] == "meta_phrase"
    accepted = rejected["beside"]
    assert (
        accepted["target_text"] in text.replace("  ", " ") or accepted["target_text"][:20] in text
    )
    first_rejected = next(StageFolder(done.run.out_dir, "format_filter").all_rejected())
    assert accepted["source_type"] == first_rejected["source_type"]


def test_it_tells_who_was_rescued_by_the_next_best(done):
    text, _ = page_of(done)
    assert "1 sources whose best candidate was refused, and a later one kept: meta_phrase 1" in text
    (rescued,) = pick_examples(done.run.out_dir).rescued
    assert rescued["refused"] == f"번역: {rescued['taken']}"
    assert rescued["taken_score"] == rescued["refused_score"] + 1


def test_it_tells_what_was_spent_and_what_was_not(done):
    teacher = {
        "requests": 1234,
        "retries": 7,
        "fallbacks": 3,
        "failures": 2,
        "prompt_tokens": 5000,
        "completion_tokens": 90_000,
        "choices": 8,
    }
    text, _ = page_of(done, teacher=teacher, answers_kept=4321)
    row = re.search(r"format_filter \d+:\d\d:\d\d (.*?) Fall-backs", text)[1]
    assert row.split() == ["1,234", "5,000", "90,000", "7", "3", "2", "–", "–", "4,321"]


def test_it_tells_of_documents_that_could_not_be_read(done):
    path = StageFolder(done.run.out_dir, "sample_sources").path / "counts.json"
    counts = json.loads(path.read_text())
    broken = [{"line": 7, "code": "broken_json", "reason": HOSTILE}]
    counts |= {
        "unreadable": {"broken_json": 1500},
        "files": [{"file": "a.jsonl.gz", "broken": broken}],
    }
    path.write_text(json.dumps(counts))
    text, page = page_of(done)
    assert "broken_json 1,500 The line of the file is no JSON" in text
    assert "a.jsonl.gz line 7" in text
    assert "<img src=x" not in page and "\x1b" not in page


def test_it_tells_of_a_pool_that_is_smaller_than_asked_for(done):
    path = StageFolder(done.run.out_dir, "sample_sources").path / "counts.json"
    counts = json.loads(path.read_text())
    counts |= {"asked": 5000, "sampled": 1234, "shortfall": {"corpus_exhausted": 3766}}
    path.write_text(json.dumps(counts))
    text, _ = page_of(done)
    assert "1,234 of 5,000 sources (missing: corpus_exhausted 3,766)" in text


def test_hostile_candidates_are_shown_and_not_obeyed(done, charts):
    for stage in ("score_select_best", "format_filter"):
        folder = StageFolder(done.run.out_dir, stage)
        records = [
            {**r, "topk": [{**c, "text": HOSTILE} for c in r["topk"]], "source_text": HOSTILE}
            for r in folder.records()
        ]
        rejected = [
            {**r, "best": {"index": 1, "text": HOSTILE, "score": 1.0}}
            for r in folder.all_rejected()
        ]
        write_stage(folder, [records], rejected)
    _, page = page_of(done)
    assert "<img src=x" not in page and "<script" not in page and "&lt;img src=x" in page


def test_a_long_text_is_cut_and_its_length_told(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    write_stage(folder, [[{**r, "target_text": "가" * 50_000} for r in folder.records()]])
    text, page = page_of(done)
    assert "50,000 characters" in text and len(page) < 600_000


def test_a_config_of_another_version_stops_no_report(done):
    (done.run.out_dir / "config.yaml").write_text("run: {unknown: 1}\n")
    assert "What became of the sources" in page_of(done)[0]


def test_the_smallest_of_many_are_held_and_few_more():
    top = Smallest(3)
    keys = random.Random(1).sample(range(100_000), 50_000)
    for key in keys:
        top.offer(key, {"key": key})
        assert len(top._candidates) <= 64 * 3
    assert [record["key"] for record in top.records()] == sorted(keys)[:3]
