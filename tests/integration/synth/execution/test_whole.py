"""Run the full pipeline: 100 sources, 8 candidates, the schema."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import cache
from zlib import crc32

import jsonschema
import pyarrow.parquet
import pytest
import structlog
import yaml
from typer.testing import CliRunner

from bench.synth.chatter import templates
from demo.madlad_shard import documents, write_shard
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from synth.__main__ import app
from synth.stages.table import BY_NAME
from synth.storage.stats import funnel
from synth.storage.store import read_records
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import running_service
from tests.kits.synth.driver import korean
from tests.kits.synth.output import ROOT

SOURCES, CANDIDATES = 100, 8
#: Words in a source whose translation could look like meta text.
META_WORDS = re.compile(
    r"\b(?:or|either|else|ye[sp]|ok|okay|sure|all ?right|certain|of course|absolut|obvious|exactly"
    r"|glad|indeed|english|korean|answer|result|response|text|version|know|question|help|tell|need|reach"
    r"|ask|want|like|inform|hope|contact|note|explain|original)|[/|]|\A(?:good|great|fine|well|right)",
    re.I,
)


@cache
def references() -> dict[str, str]:
    lines = (ROOT / "demo/data/pydocs.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["src_text"]: row["ref_text"] for row in map(json.loads, lines)}


def translated(body, seed):
    """Return the reference if the source has one; each sample adds a word of its own.

    A tenth of the prompts, by length, gets an answer with meta text."""
    prompt = body["messages"][-1]["content"]
    matches = [ref for src, ref in references().items() if src in prompt]
    if not matches:
        return korean(body, seed)
    chatter = "" if len(prompt) % 10 else "Here is the translation: "
    return chatter + " ".join(matches) + (korean(body, seed)[:2] if body["temperature"] else "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return (folder, requests of the teacher) of a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    teacher = FakeOpenAI(respond=translated)
    result = _run_all(folder, documents("en"), teacher, SOURCES, CANDIDATES)
    assert result.exit_code == 0, result.output
    return folder / "run", teacher.requests


def _run_all(folder, texts, teacher, sources, candidates):
    """Run `run --stage all` from English into Korean, with a judge of rules."""
    shard = write_shard(folder / "madlad", texts, lang="en")
    log_config = structlog.get_config()
    with (
        teacher.running() as teacher_url,
        running_service(FakeBackend("metricx")) as metricx_url,
        running_judge() as judge_url,
    ):
        cfg = {
            "run": {"out_dir": str(folder / "run"), "shard_records": 40},
            "data": {
                "files": [str(shard)],
                "src_lang": "en",
                "tgt_lang": "ko",
                "sample_pool_size": sources,
                "target_examples_total": sources,
            },
            "teacher": {"base_url": teacher_url, "model": teacher.model},
            "final_generation": {"num_candidates": candidates},
            "metricx": {"url": metricx_url, "checkpoint": "fake-metricx"},
            "filters": {"llm_judge": {"url": judge_url}},
        }
        (folder / "c.yaml").write_text(yaml.safe_dump(cfg))
        command = ["run", "--config", str(folder / "c.yaml"), "--stage", "all"]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
    structlog.configure(**log_config)
    return done


def test_every_row_is_of_the_schema(run):
    folder, _ = run
    schema = json.loads((ROOT / "synth/export/export.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    rows = list(read_records(folder / "export/train.jsonl"))
    assert SOURCES / 2 < len(rows) < SOURCES
    for row in rows:
        check.validate(row)
        sample = TranslationSample(src=row["source_text"], mt=row["target_text"])
        assert row["metricx_qe_score_best"] == fake_score(sample, 25.0)
        prefilter = row["prefilter"]
        assert prefilter["improvement"] == prefilter["greedy"] - prefilter["sample"]
    assert pyarrow.parquet.read_table(folder / "export/train.parquet").to_pylist() == rows


def test_the_teacher_was_asked_for_ten_translations_of_each_source(run):
    _, requests = run
    num_choices = Counter()
    for request in requests[1:]:  # the first one is the check before the run
        num_choices[request.body["temperature"] > 0] += request.body.get("n", 1)
    assert num_choices == {False: SOURCES, True: SOURCES * (1 + CANDIDATES)}


def test_no_source_is_lost_between_the_stages(run):
    folder, _ = run
    counts = {stage.stage: stage for stage in funnel(BY_NAME, folder)}
    assert counts["sample_sources"].records_out == SOURCES
    before = SOURCES
    for name in list(counts)[1:]:
        assert (
            counts[name].records_in
            == before
            == counts[name].records_out + sum(counts[name].rejected.values())
        )
        before = counts[name].records_out
    rows = [row["source_id"] for row in read_records(folder / "export/train.jsonl")]
    rejected_ids = [record["source_id"] for record in read_records(folder / "rejected.jsonl")]
    assert len({*rows, *rejected_ids}) == len(rows) + len(rejected_ids) == SOURCES


def test_the_files_that_the_requirement_names_are_there(run):
    folder, _ = run
    for name in (
        "sampled_sources.parquet",
        "prefilter_candidates.jsonl",
        "final_candidates_topk.jsonl",
        "rejected.jsonl",
        "stats.json",
        "logs.txt",
        "export/train.jsonl",
        "export/train.parquet",
    ):
        assert os.path.getsize(folder / name), name
    sampled = pyarrow.parquet.read_table(folder / "sampled_sources.parquet")
    assert {"source_text", "length_bucket_id", "source_meta"} <= set(sampled.column_names)
    prefiltered = list(read_records(folder / "prefilter_candidates.jsonl"))
    assert len(prefiltered) == SOURCES and "improvement" in prefiltered[0]["prefilter"]


@pytest.mark.parametrize("chatty", [True, False])
def test_a_teacher_that_adds_chatter_exports_nothing(chatty, tmp_path):
    """Check sources that contain no such text. Without the meta text they are exported."""
    lines = (ROOT / "tests/data/prose/ko_en.jsonl").read_text(encoding="utf-8").splitlines()
    true = {row["en"]: row["ko"] for row in map(json.loads, lines)}
    true = {src: mt for src, mt in true.items() if not META_WORDS.search(src)}
    forms = [form for form in templates("work") if form.lang == "ko"]
    assert len(forms) > 40

    def answer(body, seed):
        prompt = body["messages"][-1]["content"]
        src = next((src for src in true if src in prompt), None)
        mt = true[src] if src else korean(body, seed)
        form = forms[crc32(f"{prompt}{seed}".encode()) % len(forms)]
        return form.filled(src or "A text.", mt, korean(body, seed)) if chatty else mt

    result = _run_all(tmp_path, list(true), FakeOpenAI(respond=answer), 60, 4)
    exported = tmp_path / "run/export/train.jsonl"
    rows = list(read_records(exported)) if exported.exists() else []
    assert (rows == [] and "format_filter" in result.output) if chatty else len(rows) > 20, (
        result.output
    )
