"""Test sampling in several processes, killed and resumed."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os

import pytest

from scorekit.errors import UserError
from synth.sources import ingest
from synth.sources.ingest import Ingest
from synth.sources.parts import Part, PartWriter
from synth.storage.store import ShardWriter, StageFolder, read_records
from tests.kits.synth.sample_sources import (
    config,
    records,
    run,
    shards,
    tree,
)


def test_shards_on_several_processes_give_the_bytes_of_one(tmp_path):
    files = shards(tmp_path)
    single_cfg = config(tmp_path / "one", files)
    run(single_cfg)
    split = config(tmp_path / "three", files)
    for shard_id in (2, 0):
        folder = run(split, shard_id=shard_id, num_shards=3, resume=True)
        assert folder.shards() is None and not (tmp_path / "three/sampled_sources.parquet").exists()
    assert run(split, shard_id=1, num_shards=3, resume=True).done()
    assert tree(tmp_path / "three") == tree(tmp_path / "one")
    assert not (folder.path / "parts").exists()


def test_a_process_says_whom_it_waits_for(tmp_path, capsys):
    run(config(tmp_path / "out", shards(tmp_path)), shard_id=1, num_shards=4)
    out = capsys.readouterr().out
    assert "waits for other shards" in out and "[0, 2, 3]" in out and "3 of 4" in out


def test_processes_that_end_together_merge_once(tmp_path):
    files = shards(tmp_path)
    run(config(tmp_path / "one", files))
    cfg = config(tmp_path / "many", files)
    fork = multiprocessing.get_context("fork")
    more = [{"shard_id": i, "num_shards": 4, "resume": True} for i in range(4)]
    children = [fork.Process(target=run, args=(cfg,), kwargs=kwargs) for kwargs in more]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def _run_until_killed(cfg, kind, method, calls):
    done = 0
    original = getattr(kind, method)

    def killed(self, *args):
        nonlocal done
        if done == calls:
            os._exit(9)
        done += 1
        return original(self, *args)

    setattr(kind, method, killed)
    run(cfg)


def killed_run(cfg, kind, method, calls):
    child = multiprocessing.get_context("fork").Process(
        target=_run_until_killed, args=(cfg, kind, method, calls)
    )
    child.start()
    child.join()
    assert child.exitcode == 9


@pytest.mark.parametrize(
    ("kind", "method", "calls", "left"),
    [(Part, "set_counts", 2, [2, 3]), (PartWriter, "write", 1, [0, 1, 2, 3])],
    ids=["after a part", "within a part"],
)
def test_a_killed_run_keeps_the_files_it_has_finished(
    tmp_path, monkeypatch, kind, method, calls, left
):
    files = shards(tmp_path)
    run(config(tmp_path / "whole", files))
    cfg = config(tmp_path / "killed", files)
    killed_run(cfg, kind, method, calls)
    read = []
    reader = Ingest.read

    def noted(self, file, *more):
        read.append(file.index)
        return reader(self, file, *more)

    monkeypatch.setattr(Ingest, "read", noted)
    with pytest.raises(UserError, match="give --resume or --overwrite"):
        run(cfg)
    run(cfg, resume=True)
    assert read == left
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
    run(cfg, resume=True)
    assert read == left


@pytest.mark.parametrize("commits", [0, 2])
def test_a_run_that_is_killed_while_it_merges_merges_again(commits, tmp_path):
    files = shards(tmp_path)
    run(config(tmp_path / "whole", files))
    cfg = config(tmp_path / "killed", files)
    killed_run(cfg, ShardWriter, "commit", commits)
    assert StageFolder(tmp_path / "killed", "sample_sources").shards() is None
    run(cfg, resume=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def test_a_part_of_another_file_is_made_again(tmp_path):
    files = shards(tmp_path, 3)
    cfg = config(tmp_path / "out", files)
    run(cfg, shard_id=0, num_shards=3)
    first = tmp_path / "corpus/data/ko/ko_clean_0000.jsonl.gz"
    first.unlink()
    assert run(cfg, resume=True).done()
    assert "ko_clean_0000.jsonl.gz" not in {
        r["source_meta"]["madlad"]["file"] for r in run(cfg, resume=True).records()
    }


def test_files_that_an_earlier_version_read_are_read_again(tmp_path):
    files = shards(tmp_path, 3)
    expected = records(config(tmp_path / "once", files))
    cfg = config(tmp_path / "out", files)
    folder = run(cfg, shard_id=0, num_shards=3)
    mark = folder.path / "parts/file-00000.json"
    content = json.loads(mark.read_bytes())
    del content["version"]  # as earlier versions wrote it, which left out blobs
    mark.write_text(json.dumps(content))
    (folder.path / "parts/file-00000.idx").write_bytes(b"")
    lines = []
    assert list(run(cfg, resume=True, print_line=lines.append).records()) == expected
    assert "sample_sources: 1 files are read again, which an earlier version has read" in lines


def test_shards_where_blobs_are_sentences_too_give_the_bytes_of_one(tmp_path):
    pairs = [[f"사람 {k}번은 자유롭다.", f"그는 {k}번 말했다."] for k in range(150)]
    texts = ["\n".join(pair) for pair in pairs]
    twins = [" ".join(pair) for pair in pairs]
    for index, part in enumerate((texts[:75], twins, texts[75:])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (tmp_path / f"part{index}.jsonl").write_text("".join(lines))
    files = [str(tmp_path / "part*.jsonl")]
    sections = {"segmentation": {"mode": "newline"}, "data": {"sample_pool_size": 70}}
    for seed in range(3):
        trees = []
        for number in (1, 3):
            out = tmp_path / f"{seed}-{number}"
            cfg = config(out, files, run={"seed": seed}, **copy.deepcopy(sections))
            for shard in range(number):
                folder = run(cfg, shard_id=shard, num_shards=number, resume=True)
            trees.append(tree(out))
            assert len({r["source_id"] for r in folder.records()}) == 70
        assert trees[0] == trees[1]


def test_a_changed_config_refuses_to_resume(tmp_path):
    run(config(tmp_path))
    with pytest.raises(UserError, match=r"segmentation.min_chars was 10, is 30"):
        run(config(tmp_path, segmentation={"min_chars": 30}), resume=True)


def test_a_run_that_is_overwritten_is_made_anew(tmp_path):
    run(config(tmp_path))
    folder = run(config(tmp_path, run={"seed": 5}), overwrite=True)
    assert list(folder.records()) == records(config(tmp_path / "other", run={"seed": 5}))


def test_batches_do_not_change_what_comes_out(tmp_path, monkeypatch):
    before = records(config(tmp_path / "1"))
    monkeypatch.setattr(ingest, "_BATCH", 3)
    assert records(config(tmp_path / "2")) == before
    assert before == [r for s in range(3) for r in read_records(run_shard(tmp_path / "2", s))]


def run_shard(out_dir, index):
    return StageFolder(out_dir, "sample_sources").shard(index)
