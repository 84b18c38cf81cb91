"""What a run leaves behind: pairs, card, views, stats, report. Stages are hand-made folders."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from synth.config import SynthConfig
from synth.distributions import Spread
from synth.driver import Context, begin, run_map_stage
from synth.estimate import estimate, plan, status
from synth.record import source_id
from synth.report import write_report
from synth.stages.export import Export, bare_url, schema
from synth.stages.format_filter import FormatFilter
from synth.stats import Exporter, StageStats, scorer_figures, write_stats
from synth.store import ShardWriter, StageFolder, digest_of, read_records
from synth.views import write_views
from tests.servers import free_port, running_service

ROOT = Path(__file__).parents[2]
HOSTILE = '</script><img src=x onerror="alert(1)"> \x1b[2J'
INFO = {
    "service": "metricx", "model": "metricx-24-tiny", "revision": "abc123", "dtype": "float32",
    "device": "cpu", "max_input_length": 1536, "commit": None, "uptime_s": 12.5,
    "versions": {"scorekit": "0.1.0", "torch": "2.9.0", "transformers": "4.57.0", "comet": None},
}  # fmt: skip


def config(out_dir, **sections):
    base = {
        "run": {"out_dir": str(out_dir), "shard_records": 4},
        "data": {"src_lang": "eng", "tgt_lang": "kor", "sample_pool_size": 12,
                 "target_examples_total": 10, "madlad_split": "noisy"},
        "teacher": {"base_url": "http://user:secret@localhost:8000/v1?token=secret",
                    "model": "served-name"},
        "final_generation": {"num_candidates": 8, "store_top_k": 2},
        "metricx": {"checkpoint": "org/metricx-24-tiny"},
        "filters": {"llm_judge": {"enabled": False}},
    }  # fmt: skip
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return SynthConfig.model_validate(base)


def gold(count):
    """True pairs, and a translation with chatter in every fifth place."""
    with (ROOT / "demo" / "data" / "pydocs.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if 40 < len(row["src_text"]) < 300]
    return [(row["src_text"], row["ref_text"]) for row in rows[:count]]


def write_stage(folder, shards, rejected=()):
    """shards: lists of records; rejected: those of the first shard."""
    folder.set_manifest({"stage": folder.name, "settings": {}, "input": None, "limit": None,
                         "digest": digest_of(folder.name), "shards": len(shards)})  # fmt: skip
    for index, records in enumerate(shards):
        lost = [{**r, "stage": folder.name} for r in (rejected if index == 0 else ())]
        codes = {}
        for record in lost:
            codes[record["reason_code"]] = codes.get(record["reason_code"], 0) + 1
        with ShardWriter(folder.shard(index)) as kept, ShardWriter(folder.rejected(index)) as out:
            for record in records:
                kept.write(record)
            for record in lost:
                out.write(record)
            out.commit()
            folder.set_mark(index, {"records": len(records), "rejected": codes, "input": None,
                                    "digest": kept.commit()})  # fmt: skip


def make_run(out_dir, count=10, chatter=5):
    """A run up to score_select_best: of 12 sources 10 were selected, in three shards."""
    records = []
    for place, (src, mt) in enumerate(gold(count + 2)):
        madlad = {"lang": "en", "split": "noisy", "doc_id": f"en_noisy_0000.jsonl.gz:{place + 1}",
                  "file": "en_noisy_0000.jsonl.gz", "line": place + 1, "segment_index": 0,
                  "segments": 1, "span": [0, len(src)]}  # fmt: skip
        records.append({
            "source_id": source_id(src), "source_text": src, "length": len(src) / 4.0,
            "source_type": "blob" if place % 2 else "sentence", "length_bucket_id": place % 3,
            "source_meta": {"madlad": madlad},
        })  # fmt: skip
        if chatter and place % chatter == 2:
            mt = f"번역: {mt}"
        worst = {"index": 3, "text": mt + " 음", "score": 20.0 + place / 10}
        records[-1]["later"] = {
            "prefilter": {"score_greedy": 5.0, "score_sample": 3.0 + place / 4,
                          "improvement": 2.0 - place / 4},
            "topk": [{"index": 6, "text": mt, "score": 1.5 + place / 8}],
            "worst": None if place == 4 else worst,
            "candidate_counts": {"asked": 8, "scored": 7, "out": {"cut": 1}},
        }  # fmt: skip
    later = [record.pop("later") for record in records]
    write_stage(StageFolder(out_dir, "sample_sources"), _cut(records))
    counts = {
        "pieces": 40, "rejected": {"duplicate": 8, "not_sampled": 20}, "documents": 15,
        "files": [{}, {}], "revision": "c0ffee", "max_files": 2, "max_documents": None,
    }  # fmt: skip
    (StageFolder(out_dir, "sample_sources").path / "counts.json").write_text(json.dumps(counts))
    records = [{**r, "prefilter": x["prefilter"]} for r, x in zip(records, later, strict=True)]
    write_stage(StageFolder(out_dir, "prefilter_score"), _cut(records))
    lost = [{**r, "reason_code": "not_selected", "reason": ""} for r in records[count:]]
    write_stage(StageFolder(out_dir, "select_sources"), _cut(records[:count]), lost)
    write_stage(StageFolder(out_dir, "generate_128"), _cut(records[:count]))
    records = [{**r, **x} for r, x in zip(records[:count], later, strict=False)]
    write_stage(StageFolder(out_dir, "score_select_best"), _cut(records))
    (out_dir / "service-metricx.json").write_text(json.dumps(INFO))
    return records


def _cut(records, size=4):
    return [records[i : i + size] for i in range(0, len(records), size)]


def run_filter(cfg, **more):
    ctx = Context(cfg, cfg.run.out_dir, **more)
    stage = FormatFilter()
    asyncio.run(run_map_stage(stage, begin(stage, ["export"], ctx), ctx))
    return ctx


def run_export(cfg, **more):
    ctx = Context(cfg, cfg.run.out_dir, **more)
    stage = Export()
    stage.run(ctx, begin(stage, [], ctx))
    return ctx


@pytest.fixture
def done(tmp_path):
    """A run with its export, and its config."""
    cfg = config(tmp_path / "run", export={"preference_pairs": True})
    (tmp_path / "run").mkdir()
    make_run(cfg.run.out_dir)
    run_filter(cfg)
    run_export(cfg)
    return cfg


def train(cfg):
    return list(read_records(cfg.run.out_dir / "export" / "train.jsonl"))


def test_the_filter_asks_a_real_judge_and_minds_one_that_is_away(tmp_path):
    from tests.judge_kit import running_judge

    make_run(tmp_path)
    with running_judge() as url:
        judge = {"enabled": True, "url": url}
        cfg = config(tmp_path, filters={"llm_judge": judge, "rule_based": False})
        ctx = run_filter(cfg)
    assert ctx.stats.judge.samples == 10
    assert ctx.stats.rejected == {"judge:meta_phrase": 2}
    kept = next(StageFolder(tmp_path, "format_filter").records())
    assert kept["filters"] == {
        "passed": [], "failed": [], "tried": [],
        "judge": {"pass": True, "reason_code": "ok", "notes": ""},
    }  # fmt: skip
    run_export(cfg)
    assert train(cfg)[0]["selection"]["filters"]["judge"]["outcome"] == "pass"
    with pytest.raises(UserError, match="is the rules back end"), running_judge() as url:
        asked = {"enabled": True, "url": url, "model": "another"}
        run_filter(config(tmp_path, filters={"llm_judge": asked}), overwrite=True)
    strict = config(tmp_path, filters={"llm_judge": {**judge, "fail_policy": "conservative"}})
    lenient = config(tmp_path, filters={"llm_judge": {**judge, "fail_policy": "permissive"}})
    with running_judge(max_field_chars=3) as url:  # an error of every sample
        strict.filters.llm_judge.url = lenient.filters.llm_judge.url = url
        told = run_filter(strict, overwrite=True).stats
        assert told.rejected == {"judge_error:invalid_input": 8, "meta_phrase": 2}
        told = run_filter(lenient, overwrite=True).stats
        assert told.records_out == 8 and told.rejected == {"meta_phrase": 2}


# -- export ----------------------------------------------------------------------------------------


def test_the_rows_have_the_six_fields_and_where_they_come_from(done):
    rows = train(done)
    assert len(rows) == 8
    jsonschema.Draft202012Validator.check_schema(schema())
    for row in rows:
        jsonschema.validate(row, schema())
    row = rows[1]
    assert list(row) == [
        "pair_id", "source_lang_code", "target_lang_code", "source_text", "target_text",
        "metricx_qe_score_best", "selection",
    ]  # fmt: skip
    src, mt = gold(2)[1]
    assert (row["source_text"], row["target_text"]) == (src, mt)
    assert (row["pair_id"], row["source_lang_code"], row["target_lang_code"]) == (
        "en->ko", "en-US", "ko-KR",
    )  # fmt: skip
    assert row["metricx_qe_score_best"] == 1.5 + 1 / 8
    assert row["selection"]["madlad"]["span"] == [0, len(src)]
    assert row["selection"]["metricx"]["versions"]["torch"] == "2.9.0"
    assert row["selection"]["filters"]["judge"]["outcome"] == "not_asked"
    assert "meta_phrase" in row["selection"]["filters"]["passed"]


def test_how_the_teacher_was_asked_stands_in_three_blocks_without_its_secrets(done):
    sentence, blob = (row["selection"]["teacher"] for row in train(done)[:2])
    assert sentence["base_url"] == "http://localhost:8000/v1"
    assert (sentence["backend"], sentence["model"]) == ("vllm_openai_compatible", "served-name")
    blocks = sentence["sampling_params"]
    assert [blocks[name]["temperature"] for name in blocks] == [0.0, 1.0, 1.0]
    assert list(blocks) == ["prefilter_greedy", "prefilter_sample", "final"]
    assert [blocks[name]["n"] for name in blocks] == [1, 1, 8]
    assert blocks["final"]["candidate"] == 6
    assert blocks["final"]["max_tokens"] == 512
    assert blob["sampling_params"]["final"]["max_tokens"] == 1536
    everything = (done.run.out_dir / "export" / "train.jsonl").read_text()
    everything += (done.run.out_dir / "export" / "README.md").read_text()
    assert "secret" not in everything and "uptime" not in everything


def test_seeds_are_those_that_the_stages_send(done):
    import inspect

    from synth.record import teacher_seed
    from synth.stages import generate_128, prefilter_score

    row = train(done)[0]
    blocks = row["selection"]["teacher"]["sampling_params"]
    name = source_id(row["source_text"])
    assert blocks["final"]["seed"] == teacher_seed(1234, name, "final")
    assert blocks["prefilter_greedy"]["seed"] == teacher_seed(1234, name, "prefilter")
    assert '["source_id"], "final")' in inspect.getsource(generate_128)
    assert '["source_id"], "prefilter")' in inspect.getsource(prefilter_score)


@pytest.mark.parametrize("url", [
    "http://user:pw@host:8000/v1", "http://host:8000/v1?key=pw", "http://host:8000/v1#pw",
    "http://pw@host:8000/v1",
])  # fmt: skip
def test_no_credentials_stay_in_a_url(url):
    assert bare_url(url) == "http://host:8000/v1"


def test_parquet_and_jsonl_say_the_same(done):
    import pyarrow.parquet

    folder = done.run.out_dir / "export"
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    for row, line in zip(rows, train(done), strict=True):
        assert _without_nulls(row) == _without_nulls(line)


def _without_nulls(value):
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def test_the_export_is_the_same_bytes_again_and_in_another_folder(done, tmp_path):
    first = {p.name: p.read_bytes() for p in (done.run.out_dir / "export").iterdir()}
    assert set(first) == {
        "train.jsonl", "train.parquet", "pairs.jsonl", "pairs.parquet", "README.md",
    }  # fmt: skip
    run_export(done, overwrite=True)
    assert {p.name: p.read_bytes() for p in (done.run.out_dir / "export").iterdir()} == first
    elsewhere = config(tmp_path / "elsewhere", export={"preference_pairs": True},
                       metricx={"checkpoint": "org/metricx-24-tiny", "batch_size": 3})  # fmt: skip
    elsewhere.run.out_dir.mkdir()
    make_run(elsewhere.run.out_dir)
    run_filter(elsewhere)
    run_export(elsewhere)
    again = {p.name: p.read_bytes() for p in (elsewhere.run.out_dir / "export").iterdir()}
    assert again == first


def test_a_row_that_is_not_of_the_schema_stops_the_export(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    records = list(folder.records())
    records[3]["source_meta"]["madlad"].pop("span")
    write_stage(folder, [records])
    before = (done.run.out_dir / "export" / "train.parquet").read_bytes()
    with pytest.raises(ValueError, match="span"):
        run_export(done, overwrite=True)
    assert (done.run.out_dir / "export" / "train.parquet").read_bytes() == before
    assert not list((done.run.out_dir / "export").glob(".*"))


def test_datasets_loads_the_folder_and_the_pairs_by_name(done, tmp_path):
    from datasets import load_dataset

    folder = str(done.run.out_dir / "export")
    cache = str(tmp_path / "cache")
    loaded = load_dataset(folder, split="train", cache_dir=cache)
    assert loaded[0] == _nulled(train(done)[0], loaded[0])
    pairs = load_dataset(folder, "preference_pairs", split="train", cache_dir=cache)
    assert pairs.num_rows == 7  # one of the eight has no other candidate
    lines = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train", cache_dir=cache)
    assert lines.num_rows == 8


def _nulled(row, like):
    """The row with the keys that only the columns have."""
    if isinstance(like, dict):
        return {key: _nulled(row.get(key), value) for key, value in like.items()}
    return row


def test_the_trainer_reads_the_export_by_its_columns(done):
    from trainer.data import load_examples

    columns = {
        "src_text": "source_text", "src_lang": "source_lang_code", "tgt_lang": "target_lang_code",
        "src_lang_code": "source_lang_code", "tgt_lang_code": "target_lang_code",
        "ref_text": "target_text",
    }  # fmt: skip
    for name in ("train.jsonl", "train.parquet"):
        examples = load_examples(done.run.out_dir / "export" / name, columns=columns)
        rows = train(done)
        assert [e.src_text for e in examples] == [row["source_text"] for row in rows]
        assert [e.ref_text for e in examples] == [row["target_text"] for row in rows]
        assert {(e.src_lang_code, e.tgt_lang_code) for e in examples} == {("en-US", "ko-KR")}


def test_pairs_put_the_chosen_against_the_worst(done):
    pairs = list(read_records(done.run.out_dir / "export" / "pairs.jsonl"))
    assert pairs[0]["chosen"] == gold(1)[0][1]
    assert pairs[0]["rejected"] == gold(1)[0][1] + " 음"
    assert pairs[0]["margin"] == pairs[0]["metricx_qe_score_rejected"] - 1.5


def test_options_of_the_export_are_kept_to(tmp_path):
    cfg = config(tmp_path, export={"formats": ["jsonl"]})
    make_run(tmp_path)
    run_filter(cfg)
    run_export(cfg)
    assert {p.name for p in (tmp_path / "export").iterdir()} == {"train.jsonl", "README.md"}
    only = config(tmp_path, export={"formats": ["parquet"]})
    run_export(only, overwrite=True)
    assert {p.name for p in (tmp_path / "export").iterdir()} == {"train.parquet", "README.md"}
    both = config(tmp_path, export={"preference_pairs": True})
    run_export(both, overwrite=True)
    assert (tmp_path / "export" / "pairs.parquet").exists()
    run_export(only, overwrite=True, limit=3)
    assert {p.name for p in (tmp_path / "export").iterdir()} == {"train.parquet", "README.md"}
    assert StageFolder(tmp_path, "export").mark(0)["records"] == 3
    assert run_export(only, overwrite=True).stats.records_out == 8


def test_an_export_waits_for_the_last_shard_of_the_filter(tmp_path):
    cfg = config(tmp_path)
    make_run(tmp_path)
    with pytest.raises(UserError, match="run --stage format_filter first"):
        run_export(cfg)
    run_filter(cfg, num_shards=2)
    with pytest.raises(UserError, match="format_filter: not done"):
        run_export(cfg)


def test_a_teacher_that_moved_does_not_make_the_export_another(done):
    teacher = {"base_url": "http://other/v1", "model": "served-name"}
    moved = config(done.run.out_dir, teacher=teacher, export={"preference_pairs": True})
    assert Export().settings(moved) == Export().settings(done)
    other = config(done.run.out_dir, teacher={"model": "another"})
    assert Export().settings(other) != Export().settings(done)


# -- card ------------------------------------------------------------------------------------------


def test_the_card_tells_licence_languages_and_what_became_of_every_source(done):
    text = (done.run.out_dir / "export" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["license"] == "odc-by"
    assert head["language"] == ["en", "ko"]
    assert head["configs"][0] == {"config_name": "default", "data_files": "train.parquet"}
    assert "served-name" in text and "org/metricx-24-tiny" in text
    settings = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    assert settings["data"]["madlad_split"] == "noisy"
    table = [line.split("|")[1:6] for line in text.splitlines() if line.startswith("| ")][1:]
    counts = {name.strip(): [int(n) for n in cells] for name, *cells, _ in table}
    assert counts["sample_sources"] == [40, 12, 28]
    assert counts["select_sources"] == [12, 10, 2]
    assert counts["format_filter"] == [10, 8, 2]
    assert counts["export"] == [8, 8, 0]
    assert all(into == out + lost for into, out, lost in counts.values())
    assert "meta_phrase 2" in text and "not_sampled 20" in text
    assert "15 documents of 2 files of revision `c0ffee`" in text
    assert "at most 2 files and all documents" in text


# -- views -----------------------------------------------------------------------------------------


def test_views_join_the_shards_in_order(done):
    out_dir = done.run.out_dir
    ctx = Context(done, out_dir)
    for stage in ("prefilter_score", "score_select_best", "format_filter"):
        write_views(ctx, stage)
    prefiltered = list(read_records(out_dir / "prefilter_candidates.jsonl"))
    assert prefiltered == list(StageFolder(out_dir, "prefilter_score").records())
    assert len(list(read_records(out_dir / "final_candidates_topk.jsonl"))) == 10
    rejected = list(read_records(out_dir / "rejected.jsonl"))
    assert [(r["stage"], r["reason_code"]) for r in rejected] == [
        ("select_sources", "not_selected"), ("select_sources", "not_selected"),
        ("format_filter", "meta_phrase"), ("format_filter", "meta_phrase"),
    ]  # fmt: skip
    before = (out_dir / "rejected.jsonl").read_bytes()
    write_views(ctx, "format_filter")
    assert (out_dir / "rejected.jsonl").read_bytes() == before
    assert not list(out_dir.glob(".*.tmp"))


def test_stored_candidates_stay_out_of_the_view_of_the_best(done):
    folder = StageFolder(done.run.out_dir, "score_select_best")
    write_stage(folder, [[{**r, "candidates": [1, 2]} for r in folder.records()]])
    write_views(Context(done, done.run.out_dir), "score_select_best")
    view = read_records(done.run.out_dir / "final_candidates_topk.jsonl")
    assert all("topk" in record and "candidates" not in record for record in view)


def test_no_view_of_a_stage_of_which_shards_are_missing(tmp_path):
    cfg = config(tmp_path)
    make_run(tmp_path)
    ctx = run_filter(cfg, num_shards=2)
    assert write_views(ctx, "format_filter") == []
    assert not (tmp_path / "rejected.jsonl").exists()


# -- stats -----------------------------------------------------------------------------------------


def test_stats_count_records_by_marks_and_add_up_what_processes_called(done):
    out_dir = done.run.out_dir
    folder = StageFolder(out_dir, "format_filter")
    killed = StageStats()  # of a process that did not live to count its records
    killed.judge.requests, killed.judge.samples, killed.records_in = 3, 30, 5
    killed.teacher = {"requests": 4, "retries": 1, "failures": 0, "completion_tokens": 90}
    killed.flush(folder, every_s=0)
    ctx = Context(done, out_dir)
    ctx.stats.judge.requests = 2
    ctx.stats.teacher = {"requests": 6, "retries": 0, "failures": 2, "completion_tokens": 10}
    stats = write_stats(ctx, "format_filter")
    assert stats == json.loads((out_dir / "stats.json").read_text())
    stage = stats["stages"]["format_filter"]
    assert (stage["records_in"], stage["records_out"], stage["rejected"]) == (
        10, 8, {"meta_phrase": 2},
    )  # fmt: skip
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
    stage = write_stats(Context(done, done.run.out_dir), "format_filter")["stages"]["format_filter"]
    assert stage["rejected"] == {"judge_error:timeout": 1}
    assert stage["distributions"]["judge"] == {"error:upstream": 1, "not asked": 6, "pass": 1}
    run_export(done, overwrite=True)
    outcomes = [row["selection"]["filters"]["judge"] for row in train(done)]
    assert outcomes[0] == {"outcome": "error", "reason_code": "", "notes": "", "error": "upstream"}
    assert [o["outcome"] for o in outcomes] == ["error", "pass", *["not_asked"] * 6]


@given(st.lists(st.floats(-25, 25), min_size=1, max_size=300))
def test_a_spread_has_all_values_in_its_bars_and_true_quantiles(values):
    spread = Spread(0.01)
    for value in values:
        spread.add(value)
    told = spread.as_dict()
    assert sum(told["counts"]) == told["n"] == len(values)
    assert len(told["edges"]) == len(told["counts"]) + 1 <= 42
    assert told["edges"][0] <= told["p0"] and told["p100"] <= told["edges"][-1]
    ranked = sorted(values)
    for share in (10, 50, 90):
        exact = ranked[max(1, math.ceil(share / 100 * len(ranked))) - 1]
        assert abs(told[f"p{share}"] - exact) <= 0.0051
    assert abs(told["mean"] - sum(values) / len(values)) < 1e-3


def test_a_spread_of_nothing_is_nothing():
    assert Spread().as_dict() is None


def test_a_stage_that_was_made_anew_is_read_anew(done):
    ctx = Context(done, done.run.out_dir)
    write_stats(ctx, "format_filter")
    folder = StageFolder(done.run.out_dir, "format_filter")
    write_stage(folder, [list(folder.records())[:2]])
    stages = write_stats(ctx, "format_filter")["stages"]
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
            before = scorer_figures(url, {})
            httpx.post(f"{url}/v1/score", json={"samples": [sample]}).raise_for_status()
        assert before["batches"] >= 1
        after = scorer_figures([url], before)
        anew = scorer_figures(url, dict.fromkeys(before, 1e9))  # it was started again
    assert after["batches"] == 1 and after["batch_samples"] == 1
    assert anew["batches"] == before["batches"] + 1
    assert after["memory_peak_bytes"] > 1e6
    assert scorer_figures("http://127.0.0.1:9", {}) == {}


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
        with pytest.raises(httpx.ConnectError):  # answered by a server on all addresses
            httpx.get(f"http://127.0.0.2:{port}/metrics")
    finally:
        exporter.close()


# -- report, status, estimate ----------------------------------------------------------------------


def test_the_report_shows_funnel_reasons_pictures_and_pairs(done):
    write_stats(Context(done, done.run.out_dir), "format_filter")
    page = write_report(done.run.out_dir).read_text()
    assert page == write_report(done.run.out_dir).read_text()
    assert page.count("<svg") == 6
    for told in ("not_sampled", "meta_phrase", "select_sources", gold(1)[0][1][:20], "번역:"):
        assert told in page
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=[\"']?https?:|url\(['\"]?https?:|@import", page)


def test_hostile_texts_are_shown_and_not_obeyed(done):
    folder = StageFolder(done.run.out_dir, "format_filter")
    records = [{**r, "source_text": HOSTILE, "target_text": HOSTILE} for r in folder.records()]
    lost = [{**records[0], "reason_code": "tag", "reason": HOSTILE}]
    write_stage(folder, [records], lost)
    page = write_report(done.run.out_dir).read_text()
    assert "<img src=x" not in page and "\x1b" not in page
    assert "&lt;img src=x" in page and "␛[2J" in page


def test_a_report_of_a_run_that_has_only_begun(tmp_path):
    with pytest.raises(UserError, match="no run here"):
        write_report(tmp_path)
    make_run(tmp_path)
    assert "sample_sources" in write_report(tmp_path).read_text()


def _shown(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_status_tells_shards_counts_and_the_time_left(tmp_path):
    with pytest.raises(UserError, match="no run here"):
        status(tmp_path)
    cfg = config(tmp_path)
    make_run(tmp_path)
    ctx = run_filter(cfg, num_shards=3)
    ctx.stats.began, ctx.stats.started = ctx.stats.began - 8, ctx.stats.started - 8
    ctx.stats.flush(ctx.folder("format_filter"), every_s=0)
    lines = {line.split("│")[1].strip(): line for line in _shown(status(tmp_path)).splitlines()
             if line.startswith("│")}  # fmt: skip
    row = [cell.strip() for cell in lines["format_filter"].split("│")]
    assert row[2:6] == ["1 of 3", "4", "3", "1"]
    assert row[7] in ("0:00:12", "0:00:11", "0:00:13")  # 6 left at 4 in 8 s
    assert "done" in lines["select_sources"]
    assert "–" in lines["export"]


def test_an_estimate_counts_requests_sequences_and_tokens(tmp_path):
    cfg = config(tmp_path, data={"sample_pool_size": 1000, "target_examples_total": 50},
                 final_generation={"num_candidates": 128})  # fmt: skip
    costs = {cost.stage: cost for cost in plan(cfg, 1000.0).costs}
    assert costs["prefilter_score"].requests == costs["prefilter_score"].scored == 2000
    assert costs["generate_128"].requests == 50 * 4
    assert costs["generate_128"].sequences == costs["score_select_best"].scored == 6400
    assert costs["format_filter"].judged == 0
    assert costs["generate_128"].tokens_out > costs["generate_128"].tokens_in
    made = plan(cfg, 1000.0)
    assert made.hours(costs["generate_128"]) == costs["generate_128"].tokens_out / 3.6e6
    assert "generate_128" in _shown(estimate(cfg, tokens_per_s=1000.0))
    alone = config(tmp_path, data={"sample_pool_size": 1000, "target_examples_total": 50},
                   final_generation={"num_candidates": 128, "strategy": "per_call"})  # fmt: skip
    assert plan(alone, 1000.0).costs[3].requests == 6400
    stored = config(tmp_path, final_generation={"num_candidates": 128, "store_candidates": True})
    bare = config(tmp_path, final_generation={"num_candidates": 128})
    assert plan(stored, 1000.0).disk_bytes > plan(bare, 1000.0).disk_bytes


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
]  # fmt: skip


@pytest.mark.parametrize(("sections", "told"), WARNINGS, ids=[told[:25] for _, told in WARNINGS])
def test_an_estimate_warns_of_what_will_go_wrong(tmp_path, sections, told):
    merged = {name: {**FINE.get(name, {}), **sections.get(name, {})} for name in {*FINE, *sections}}
    assert not any(told in line for line in plan(config(tmp_path, **FINE), 7500.0).warnings)
    assert any(told in line for line in plan(config(tmp_path, **merged), 7500.0).warnings)


def test_an_estimate_warns_of_a_timeout_that_a_slow_server_cannot_keep(tmp_path):
    cfg = config(tmp_path, **FINE)
    assert not any("request_timeout_s" in line for line in plan(cfg, 7500.0).warnings)
    assert any("request_timeout_s" in line for line in plan(cfg, 50.0).warnings)


def test_an_export_that_is_killed_while_writing_leaves_the_old_one_whole(done):
    """kill -9 in the middle: the names hold whole files, and the next call writes the same."""
    folder = done.run.out_dir / "export"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    code = (
        "import os, signal, sys\n"
        "from tests.integration.test_synth_output import config, run_export\n"
        "import synth.stages.export as export\n"
        "count = iter(range(100))\n"
        "make = export.row_maker\n"
        "def dying(*args):\n"
        "    inner = make(*args)\n"
        "    return lambda r: inner(r) if next(count) < 5 else os.kill(os.getpid(), 9)\n"
        "export.row_maker = dying\n"
        "run_export(config(sys.argv[1], export={'preference_pairs': True}), overwrite=True)\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", code, str(done.run.out_dir)], cwd=ROOT, env={**os.environ},
        capture_output=True, check=False,
    )  # fmt: skip
    assert died.returncode == -9, died.stderr.decode()
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name[0] != "."} == before
    assert StageFolder(done.run.out_dir, "export").mark(0) is None
    run_export(done, resume=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
