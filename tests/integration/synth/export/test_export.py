"""Check the export: rows, schema, provenance, and the same bytes in a second export."""

from __future__ import annotations

import os
import sys

import jsonschema
import pytest
import yaml

from scorekit.errors import UserError
from synth.export.rows import bare_url, schema
from synth.record import source_id
from synth.stages.export import Export
from synth.storage.store import StageFolder, read_records
from tests.kits import forked
from tests.kits.synth.output import (
    ROOT,
    config,
    gold,
    make_run,
    run_export,
    run_filter,
    train,
    write_stage,
)


def test_the_rows_have_the_six_fields_and_where_they_come_from(done):
    rows = train(done)
    assert len(rows) == 8
    jsonschema.Draft202012Validator.check_schema(schema())
    for row in rows:
        jsonschema.validate(row, schema())
    row = rows[1]
    assert list(row) == [
        "pair_id",
        "source_lang_code",
        "target_lang_code",
        "source_text",
        "target_text",
        "metricx_qe_score_best",
        "source_id",
        "kind",
        "bucket",
        "prefilter",
        "selection",
    ]
    assert (row["source_id"], row["kind"], row["bucket"]) == (source_id(gold(2)[1][0]), "blob", 1)
    assert row["prefilter"] == {"greedy": 5.0, "sample": 3.25, "improvement": 1.75, "rank": 1}
    src, mt = gold(2)[1]
    assert (row["source_text"], row["target_text"]) == (src, mt)
    assert (row["pair_id"], row["source_lang_code"], row["target_lang_code"]) == (
        "en->ko",
        "en-US",
        "ko-KR",
    )
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


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pw@host:8000/v1",
        "http://host:8000/v1?key=pw",
        "http://host:8000/v1#pw",
        "http://pw@host:8000/v1",
    ],
)
def test_no_credentials_stay_in_a_url(url):
    assert bare_url(url) == "http://host:8000/v1"


def test_parquet_and_jsonl_say_the_same(done):
    import pyarrow.parquet

    folder = done.run.out_dir / "export"
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    assert rows == train(done)
    pairs = pyarrow.parquet.read_table(folder / "pairs.parquet").to_pylist()
    assert pairs == list(read_records(folder / "pairs.jsonl"))


def test_the_export_is_the_same_bytes_again_and_in_another_folder(done, tmp_path):
    first = {p.name: p.read_bytes() for p in (done.run.out_dir / "export").iterdir()}
    assert set(first) == {
        "train.jsonl",
        "train.parquet",
        "pairs.jsonl",
        "pairs.parquet",
        "README.md",
        "manifest.json",
    }
    run_export(done, overwrite=True)
    assert {p.name: p.read_bytes() for p in (done.run.out_dir / "export").iterdir()} == first
    elsewhere = config(
        tmp_path / "elsewhere",
        export={"preference_pairs": True},
        metricx={"checkpoint": "org/metricx-24-tiny", "batch_size": 3},
    )
    elsewhere.run.out_dir.mkdir()
    make_run(elsewhere.run.out_dir)
    run_filter(elsewhere)
    run_export(elsewhere)
    second_export = {p.name: p.read_bytes() for p in (elsewhere.run.out_dir / "export").iterdir()}
    assert second_export == first


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
    assert list(loaded) == train(done)
    pairs = load_dataset(folder, "preference_pairs", split="train", cache_dir=cache)
    assert pairs.num_rows == 7  # one of the eight has no other candidate
    lines = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train", cache_dir=cache)
    assert lines.num_rows == 8


def test_the_trainer_reads_the_export_by_its_columns(done):
    from trainer.translation.data import load_examples

    columns = {
        "src_text": "source_text",
        "src_lang": "source_lang_code",
        "tgt_lang": "target_lang_code",
        "src_lang_code": "source_lang_code",
        "tgt_lang_code": "target_lang_code",
        "ref_text": "target_text",
    }
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
    assert {p.name for p in (tmp_path / "export").iterdir()} == {
        "train.jsonl",
        "README.md",
        "manifest.json",
    }
    only = config(tmp_path, export={"formats": ["parquet"]})
    run_export(only, overwrite=True)
    assert {p.name for p in (tmp_path / "export").iterdir()} == {
        "train.parquet",
        "README.md",
        "manifest.json",
    }
    both = config(tmp_path, export={"preference_pairs": True})
    run_export(both, overwrite=True)
    assert (tmp_path / "export" / "pairs.parquet").exists()
    run_export(only, overwrite=True, limit=3)
    assert {p.name for p in (tmp_path / "export").iterdir()} == {
        "train.parquet",
        "README.md",
        "manifest.json",
    }
    assert StageFolder(tmp_path, "export").mark(0)["records"] == 3
    assert run_export(only, overwrite=True).stats.records_out == 8


def test_an_export_waits_for_the_last_shard_of_the_filter(tmp_path):
    cfg = config(tmp_path)
    make_run(tmp_path)
    with pytest.raises(UserError, match="Run --stage format_filter first"):
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


def test_the_card_tells_licence_languages_and_what_became_of_every_source(done):
    text = (done.run.out_dir / "export" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["license"] == "odc-by"
    assert head["language"] == ["en", "ko"]
    assert head["configs"][0] == {
        "config_name": "default",
        "data_files": [{"split": "train", "path": "train.parquet"}],
    }
    assert "served-name" in text and "org/metricx-24-tiny" in text
    settings = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    assert settings["data"]["madlad_split"] == "noisy"
    records = text.split("## Records")[1].split("## Fields")[0]
    table = [line.split("|")[1:6] for line in records.splitlines() if line.startswith("| ")][1:]
    counts = {name.strip(): [int(n) for n in cells] for name, *cells, _ in table}
    assert counts["sample_sources"] == [40, 12, 28]
    assert counts["select_sources"] == [12, 10, 2]
    assert counts["format_filter"] == [10, 8, 2]
    assert counts["export"] == [8, 8, 0]
    assert all(
        num_in == num_out + num_rejected for num_in, num_out, num_rejected in counts.values()
    )
    assert "meta_phrase 2" in text and "not_sampled 20" in text
    assert "15 documents of 2 files of revision `c0ffee`" in text
    assert "at most 2 files and all documents" in text
    assert "left out before: broken_json 1" in text


def test_an_export_that_is_killed_while_writing_leaves_the_old_one_whole(done):
    """Check kill -9 in the middle: the names are complete files, and the next call writes the
    same."""
    folder = done.run.out_dir / "export"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    code = (
        "import os, signal, sys\n"
        "from tests.kits.synth.output import config, run_export\n"
        "import synth.export.files as export\n"
        "count = iter(range(100))\n"
        "make = export.row_maker\n"
        "def dying(*args):\n"
        "    inner = make(*args)\n"
        "    return lambda r: inner(r) if next(count) < 5 else os.kill(os.getpid(), 9)\n"
        "export.row_maker = dying\n"
        "run_export(config(sys.argv[1], export={'preference_pairs': True}), overwrite=True)\n"
    )
    died = forked.run(
        [sys.executable, "-c", code, str(done.run.out_dir)],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
    )
    assert died.returncode == -9, died.stderr.decode()
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name[0] != "."} == before
    assert StageFolder(done.run.out_dir, "export").mark(0) is None
    run_export(done, resume=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
