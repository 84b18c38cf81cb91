"""Test sample_sources over shards of both layouts: resumed, in several processes, as on the hub."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from demo.madlad_shard import documents, write_shard
from scorekit.errors import UserError
from synth.config import DataConfig
from synth.sources.madlad import (
    REVISION,
    SourceFile,
    hub_pattern,
    madlad_id,
    read_documents,
    source_files,
)
from synth.stages.sample_sources import SampleSources
from synth.storage.store import digest_file
from tests.kits.synth.driver import prepared
from tests.kits.synth.sample_sources import (
    V1,
    V15,
    config,
    counts,
    records,
    run,
    stored,
)


def test_the_pool_is_filled_with_sentences_and_blobs_that_know_where_they_stand(tmp_path):
    folder = run(config(tmp_path))
    sampled = list(folder.records())
    assert len(sampled) == 120 and folder.done()
    assert [folder.mark(i)["records"] for i in range(folder.shards())] == [50, 50, 20]
    mark = folder.mark(0)
    assert mark["digest"] == digest_file(folder.shard(0)) and mark["input"] is None
    assert {r["source_type"] for r in sampled} == {"sentence", "blob"}
    assert len({r["source_id"] for r in sampled}) == 120
    for record in sampled:
        meta = record["source_meta"]["madlad"]
        assert (meta["lang"], meta["split"]) == ("ko", "clean")
        assert meta["doc_id"] == f"{meta['file']}:{meta['line']}"
        start, end = meta["span"]
        assert stored(meta)[start:end] == record["source_text"]
        assert (meta["segments"] > 1) == (record["source_type"] == "blob")
    assert any("\n\n" in r["source_text"] for r in sampled if r["source_type"] == "blob")


def test_the_layout_with_escaped_line_ends_gives_the_same_sources(tmp_path):
    old, new = records(config(tmp_path / "1")), records(config(tmp_path / "2", [V15]))
    assert [r["source_text"] for r in new] == [r["source_text"] for r in old]
    for record in new:
        meta = record["source_meta"]["madlad"]
        start, end = meta["span"]
        assert stored(meta, "escaped")[start:end].replace("\\n", "\n") == record["source_text"]
        assert meta["url"].startswith("https://docs.python.org/")


def test_list_field_and_string_field_give_the_same_sources(tmp_path):
    texts = documents("ko", 0, 8)
    as_text = write_shard(tmp_path, texts, lang="ko")
    as_list = tmp_path / "lists.jsonl"
    lines = [json.dumps({"text": text.split("\n")}) + "\n" for text in texts]
    as_list.write_text("".join(lines))
    first = records(config(tmp_path / "1", [str(as_text)]))
    second = records(config(tmp_path / "2", [str(as_list)]))
    assert [r["source_text"] for r in first] == [r["source_text"] for r in second]
    assert len(first) > 50
    mode = {"mode": "list_field"}
    folder = run(config(tmp_path / "3", [str(as_text), str(as_list)], segmentation=mode))
    assert counts(folder)["unreadable"] == {"not_a_list": 8}


def test_bucket_quotas_are_met_and_what_is_lacking_is_refilled(tmp_path):
    blob, edges = {"enabled": False}, [0, 10, 20, 40, 80, 999]
    bucketing = {"boundaries": edges, "per_bucket_quota": [10, 20, 30, 15, 25]}
    folder = run(config(tmp_path, bucketing=bucketing, blob=blob))
    got = Counter(r["length_bucket_id"] for r in folder.records())
    quotas = counts(folder)["quotas"]["sentence"]
    assert quotas == [10, 20, 30, 15, 25] and sum(got.values()) == 100
    assert got[4] < 25  # too few texts are that long
    assert all(got[i] > quotas[i] for i in range(3))
    for record in folder.records():
        assert edges[record["length_bucket_id"]] <= record["length"]
        assert record["length"] < edges[record["length_bucket_id"] + 1]


def test_what_goes_in_is_sampled_or_rejected_with_a_code(tmp_path):
    stage = SampleSources()
    manifest, work = prepared(stage, config(tmp_path))
    stage.run(work, manifest)
    stats, stage_counts = work.progress.stats, counts(work.folder)
    assert stage_counts["pieces"] == stage_counts["sampled"] + sum(
        stage_counts["rejected"].values()
    )
    assert {"too_short", "noise_code", "not_sampled"} <= set(stage_counts["rejected"])
    assert stage_counts["documents"] == 24 and stage_counts["sampled"] == 120
    assert (stats.records_in, stats.records_out) == (stage_counts["pieces"], 120)
    assert sum(map(sum, stage_counts["by_bucket"].values())) == 120


def test_lengths_outside_of_all_buckets_are_counted(tmp_path):
    stage_counts = counts(run(config(tmp_path, bucketing={"boundaries": [10, 20]})))
    assert stage_counts["rejected"]["no_bucket"] > 100
    assert stage_counts["pieces"] == stage_counts["sampled"] + sum(
        stage_counts["rejected"].values()
    )


def test_copies_with_other_white_space_are_in_the_same_bucket(tmp_path):
    texts = documents("ko", 0, 6)
    once = write_shard(tmp_path / "a", texts, lang="ko")
    wide = [text.replace(" ", " " * 9) for text in texts]
    repeated = write_shard(tmp_path / "b", wide, lang="ko", index=1)
    cut = {"min_chars": 1, "noise_rules": False}
    sections = {"segmentation": cut, "blob": {"enabled": False}, "data": {"sample_pool_size": 900}}
    first = records(config(tmp_path / "1", [str(once)], **sections))
    both = records(config(tmp_path / "2", [str(repeated), str(once)], **sections))
    assert [(r["source_text"], r["length"]) for r in both] == [
        (r["source_text"], r["length"]) for r in first
    ]
    wide_only = records(config(tmp_path / "3", [str(repeated)], **sections))
    assert [r["length"] for r in wide_only] == [r["length"] for r in first]
    assert [r["source_id"] for r in wide_only] == [r["source_id"] for r in first]


def test_copies_of_a_text_are_one_source(tmp_path):
    texts = documents("ko", 0, 6)
    once = write_shard(tmp_path / "a", texts, lang="ko")
    repeated = write_shard(
        tmp_path / "b", [t.replace(" ", "\t") for t in texts], lang="ko", index=1
    )
    first = run(config(tmp_path / "1", [str(once)]))
    both = run(config(tmp_path / "2", [str(once), str(repeated)]))
    drop = ("source_meta",)
    assert [{k: v for k, v in r.items() if k not in drop} for r in both.records()] == [
        {k: v for k, v in r.items() if k not in drop} for r in first.records()
    ]
    assert counts(both)["rejected"]["duplicate"] >= counts(both)["sampled"]


def test_a_blob_that_reads_as_a_sentence_is_that_sentence(tmp_path):
    first, second = "모든 인간은 태어날 때부터 자유롭다.", "인간은 이성과 양심을 부여받았다."
    path = tmp_path / "some.jsonl"
    texts = [f"{first}\n{second}", f"{first} {second}"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = run(config(tmp_path / "out", [str(path)]))
    assert sorted((r["source_type"], r["source_text"]) for r in folder.records()) == sorted(
        ("sentence", text) for text in (first, second, texts[1])
    )
    assert counts(folder)["rejected"] == {"duplicate": 1}


def write_twins(path, num_twins, num_documents):
    """Write documents of two lines, of which some are also one line in a later document."""
    pairs = [
        [f"사람 {k}번은 태어날 때부터 자유롭다.", f"사람 {k}번은 이성을 부여받았다."]
        for k in range(num_documents)
    ]
    texts = ["\n".join(pair) for pair in pairs] + [" ".join(pair) for pair in pairs[:num_twins]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_the_pool_has_its_size_and_its_share_of_blobs_where_blobs_are_sentences_too(
    ratio, tmp_path
):
    """The corpus has 80 sentences, 40 blobs, and 40 sentences of the same text as a blob."""
    write_twins(tmp_path / "some.jsonl", num_twins=40, num_documents=40)
    for seed in range(9):
        pool = (120, 50, 37)[seed % 3] if ratio < 0.5 else 50
        folder = run(
            config(
                tmp_path / f"{seed}",
                [str(tmp_path / "some.jsonl")],
                bucketing={"boundaries": [0, 9999]},
                blob={"blob_ratio": ratio},
                data={"sample_pool_size": pool},
                segmentation={"mode": "newline"},
                run={"seed": seed},
            )
        )
        sampled = list(folder.records())
        assert len({r["source_id"] for r in sampled}) == len(sampled) == pool
        types = Counter(r["source_type"] for r in sampled)
        assert abs(types["blob"] - ratio * pool) < 1
        assert "shortfall" not in counts(folder)


def test_a_pool_that_the_corpus_cannot_fill_says_what_is_missing(tmp_path, capsys):
    write_twins(tmp_path / "some.jsonl", num_twins=10, num_documents=20)
    sections = {
        "bucketing": {"boundaries": [0, 9999]},
        "segmentation": {"mode": "newline"},
        "data": {"sample_pool_size": 200},
    }
    lines = []
    cfg = config(tmp_path / "1", [str(tmp_path / "some.jsonl")], **sections)
    folder = run(cfg, print_line=lines.append)
    assert len(list(folder.records())) == 60  # 40 lines, 20 blobs; 10 of them are a line, too
    assert counts(folder)["asked"] == 200
    assert counts(folder)["shortfall"] == {"corpus_exhausted": 140}
    assert lines == [
        "sample_sources: the pool has 60 of 200 sources (missing: corpus_exhausted 140)"
    ]
    assert counts(folder)["rejected"] == {"duplicate": 10}
    sections["bucketing"]["per_bucket_quota"] = 50
    sections["data"] = {"sample_pool_size": 60, "near_duplicates": 0.5}
    cfg = config(tmp_path / "2", [str(tmp_path / "some.jsonl")], **sections)
    folder = run(cfg)
    missing = counts(folder)["shortfall"]
    assert missing["per_bucket_quota"] == 10 and missing["screened"] > 10
    assert sum(missing.values()) + len(list(folder.records())) == 60


def test_the_merged_view_holds_the_same_records(tmp_path):
    import pyarrow.parquet as pq

    sampled = records(config(tmp_path))
    assert pq.read_table(tmp_path / "sampled_sources.parquet").to_pylist() == sampled


def test_a_smaller_pool_is_the_beginning_of_a_larger_one_where_quotas_do_not_bind(tmp_path):
    sections = {"bucketing": {"boundaries": [0, 9999]}, "blob": {"enabled": False}}
    large = records(config(tmp_path / "1", **sections))
    small = records(config(tmp_path / "2", **sections), limit=30)
    assert small == large[:30] and len(small) == 30


CHANGES = {
    "run.seed": {"run": {"seed": 99}},
    "data.madlad_split": {"data": {"madlad_split": "noisy"}},
    "data.src_lang": {"data": {"src_lang": "en"}},
    "data.sample_pool_size": {"data": {"sample_pool_size": 40}},
    "data.newlines": {"data": {"newlines": "real"}},
    "data.max_files": {"data": {"max_files": 1}},
    "data.max_documents": {"data": {"max_documents": 5}},
    "segmentation.mode": {"segmentation": {"mode": "newline"}},
    "segmentation.min_chars": {"segmentation": {"min_chars": 40}},
    "segmentation.max_chars": {"segmentation": {"max_chars": 30}},
    "segmentation.merge_short": {"segmentation": {"merge_short": True}},
    "segmentation.noise_rules": {"segmentation": {"noise_rules": False}},
    "bucketing.boundaries": {"bucketing": {"boundaries": [0, 15, 999]}},
    "bucketing.measure": {"bucketing": {"measure": "whitespace"}},
    "bucketing.per_bucket_quota": {"bucketing": {"per_bucket_quota": 3}},
    "blob.enabled": {"blob": {"enabled": False}},
    "blob.blob_ratio": {"blob": {"blob_ratio": 0.1}},
    "blob.blob_max_tokens": {"blob": {"blob_max_tokens": 100}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    lists = folder / "lists.jsonl"
    texts = [text.split("\n") for text in documents("ko", 40, 3)]
    lists.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    escaped = folder / "escaped.jsonl"
    texts = [text.replace("\n", "\\n") for text in documents("ko", 50, 3)]
    escaped.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = [V1, str(lists), str(escaped)]
    return files, records(config(folder / "out", files))


@pytest.mark.parametrize("key", CHANGES)
def test_each_key_changes_the_sample(key, plain, tmp_path):
    files, before = plain
    cfg = config(tmp_path, files, **CHANGES[key])
    assert SampleSources().settings(cfg) != SampleSources().settings(config(tmp_path, files))
    assert records(cfg) != before


@pytest.mark.parametrize("code", ["kor", "ko", "ko-KR", "Korean"])
def test_any_code_of_a_language_finds_its_files_and_no_other(code, tmp_path):
    for lang in ("ko", "kos", "ja"):
        write_shard(tmp_path, ["text"], lang=lang)
    data = DataConfig(src_lang=code, tgt_lang="en", files=[str(tmp_path / "data/*/*.gz")])
    assert madlad_id(code) == "ko"
    assert [f.name for f in source_files(data)] == ["ko_clean_0000.jsonl.gz"]


def test_hub_files_are_named_by_a_pinned_revision():
    data = DataConfig(src_lang="kor", tgt_lang="eng", madlad_split="noisy")
    root = f"hf://datasets/allenai/MADLAD-400@{REVISION}"
    assert hub_pattern(data) == f"{root}/data/ko/ko_noisy_*.jsonl.gz"
    pinned = SampleSources().settings(config("out", data={"files": None}))["data"]
    assert pinned["madlad_revision"] == REVISION
    other = data.model_copy(update={"madlad_dataset": "me/mine", "madlad_revision": "main"})
    assert hub_pattern(other) == "hf://datasets/me/mine@main/data/ko/ko_noisy_*.jsonl.gz"


def test_a_hub_that_is_out_of_reach_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"name local shards in data\.files"):
        run(config(tmp_path, data={"files": None}))


def test_streaming_through_datasets_reads_what_a_local_file_holds(tmp_path):
    local, remote = config(tmp_path / "1"), config(tmp_path / "2", [f"file://{V1}"])
    assert all("://" in f.url for f in source_files(remote.data))
    assert records(remote) == records(local)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_broken_line_is_counted_and_told_of_and_the_rest_is_read(scheme, tmp_path):
    path = tmp_path / "some.jsonl.gz"
    texts = documents("ko", 0, 4)
    lines = [json.dumps({"text": text}).encode() for text in texts]
    lines[2:2] = [
        b'{"text": "torn',
        b'{"url": "x"}',
        b'{"text": "\xff"}',
        b"",
        b'{"text": "\\ud800"}',
    ]
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    broken = []
    file = SourceFile(0, path.name, f"{scheme}{path}")
    read_docs = list(read_documents(file, lambda *file_counts: broken.append(file_counts)))
    assert [(d.line, d.text) for d in read_docs] == list(zip([1, 2, 8, 9], texts, strict=True))
    assert [(line, code) for line, code, _ in broken] == [
        (3, "broken_json"),
        (4, "no_text"),
        (5, "broken_json"),
        (7, "broken_json"),
    ]
    folder = run(config(tmp_path / "out", [file.url]))
    (file_counts,) = counts(folder)["files"]
    assert file_counts["broken_lines"] == 4 and file_counts["broken"][0]["line"] == 3
    assert counts(folder)["unreadable"] == {"broken_json": 3, "no_text": 1}


def test_what_was_streamed_before_a_broken_line_is_not_read_again(tmp_path):
    path = tmp_path / "large.jsonl"
    large = "x" * (11 << 20)  # more than the builder reads at once
    lines = [json.dumps({"text": large}), "{", json.dumps({"text": "last"})]
    path.write_text("\n".join(lines) + "\n")
    broken = []
    file = SourceFile(0, path.name, f"file://{path}")
    documents = list(read_documents(file, lambda *report: broken.append(report)))
    assert [(d.line, len(d.text)) for d in documents] == [(1, len(large)), (3, 4)]
    assert [report[:2] for report in broken] == [(2, "broken_json")]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_torn_gzip_is_counted_and_told_of(scheme, tmp_path):
    path = tmp_path / "torn.jsonl.gz"
    lines = [json.dumps({"text": text}) + "\n" for text in documents("ko")]
    content = gzip.compress("".join(lines).encode())
    path.write_bytes(content[: len(content) // 2])
    folder = run(config(tmp_path / "out", [f"{scheme}{path}"]))
    (file_counts,) = counts(folder)["files"]
    assert 0 < file_counts["documents"] < len(lines)
    assert [(b["code"], b["line"]) for b in file_counts["broken"]] == [
        ("broken_gzip", file_counts["documents"] + 1)
    ]


def test_what_cannot_work_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="both layouts"):
        run(config(tmp_path / "1", [V1, V15]))
    with pytest.raises(UserError, match=r"nowhere/\*\.gz: no such file"):
        run(config(tmp_path / "2", ["nowhere/*.gz"]))
    with pytest.raises(UserError, match="4 files, none of ja clean"):
        run(config(tmp_path / "3", data={"src_lang": "jpn"}))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("no JSON\n")
    with pytest.raises(
        UserError, match=r"no document in empty.jsonl; the first: empty.jsonl line 1"
    ):
        run(config(tmp_path / "4", [str(empty)]))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"folder.jsonl: cannot be read: .*--resume"):
        run(config(tmp_path / "6", [str(tmp_path / "folder.jsonl")]))
    with pytest.raises(UserError, match="24 documents, and no source left"):
        run(config(tmp_path / "5", segmentation={"min_chars": 5000}))


def test_at_most_max_documents_are_read_an_equal_share_of_each_file(tmp_path):
    folder = run(config(tmp_path, data={"max_documents": 7}))
    stage_counts = counts(folder)
    assert [f["documents"] for f in stage_counts["files"]] == [4, 3]
    assert (stage_counts["max_documents"], stage_counts["max_files"]) == (7, None)
