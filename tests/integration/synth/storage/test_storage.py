"""Check how shards are stored, what the views cost, and what is deleted when it is not needed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.files import temporary_of, write_atomic
from synth.__main__ import app
from synth.repair import repair
from synth.run import RunOptions, run_stages
from synth.storage.store import ShardWriter, StageFolder, digest_file, read_records
from tests.kits.synth import output as output_kit
from tests.kits.synth.driver import NAMES, TEXTS, config, output, records, write_sources


def test_a_folder_holds_a_thousand_shards(tmp_path):
    folder = StageFolder(tmp_path, "prefilter_score")
    assert folder.shard(999).parent == folder.shard(0).parent
    assert folder.shard(123_456).relative_to(folder.path).as_posix() == (
        "123/shard-123456.jsonl.zst"
    )


def test_the_digest_is_of_the_lines_whatever_compressed_them(tmp_path):
    digests = set()
    for name in ("plain.jsonl", "small.jsonl.zst"):
        with ShardWriter(tmp_path / name) as shard:
            for number in range(1000):
                shard.write({"number": number, "text": "한 줄"})
            digests |= {shard.commit(), digest_file(tmp_path / name)}
    assert len(digests) == 1
    assert list(read_records(tmp_path / name))[999] == {"number": 999, "text": "한 줄"}
    assert (tmp_path / name).stat().st_size * 4 < (tmp_path / "plain.jsonl").stat().st_size


def test_a_folder_of_another_version_is_refused_in_one_line(tmp_path):
    output_kit.make_run(tmp_path)
    path = tmp_path / "stages/score_select_best/stage.json"
    manifest = json.loads(path.read_bytes())
    del manifest["layout"]  # like a folder of 0.1.0
    write_atomic(path, json.dumps(manifest).encode())
    with pytest.raises(UserError, match=r"written by another version.*run.answers: .*answers\.sq"):
        output_kit.run_filter(output_kit.config(tmp_path))


def test_scored_candidates_go_and_come_back_from_the_kept_answers(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run_stages(cfg, RunOptions(tuple(NAMES)))
    before, folder = output(tmp_path), StageFolder(tmp_path, "generate_128")
    assert folder.done() and not list(folder.path.glob("*/shard-*"))
    run_stages(cfg, RunOptions(tuple(NAMES), resume=True))  # no files are missing
    lines = list(repair(cfg))
    assert lines[0] == "0 damaged shards"
    overwrite_options = RunOptions(("score_select_best",), overwrite=True)
    with pytest.raises(UserError, match="run --stage generate_128 --overwrite"):
        run_stages(cfg, overwrite_options)
    num_requests = len(teacher.requests)
    run_stages(cfg, RunOptions(tuple(NAMES[2:]), overwrite=True))
    assert output(tmp_path) == before and len(teacher.requests) == num_requests
    run_stages(cfg, RunOptions(("generate_128",), resume=True, repair=1))
    assert folder.shard(1).exists() and not folder.shard(0).exists()
    run_stages(cfg, RunOptions(("score_select_best",), resume=True, repair=1))
    assert output(tmp_path) == before and len(teacher.requests) == num_requests
    assert not folder.shard(1).exists()


def test_one_repair_makes_a_shard_again_whose_candidates_are_gone(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run_stages(cfg, RunOptions(tuple(NAMES)))
    before, num_requests = output(tmp_path), len(teacher.requests)
    scored, generated = (StageFolder(tmp_path, NAMES[i]) for i in (3, 2))
    scored.shard(1).write_bytes(b"nothing of ours")
    (message, *_) = repair(cfg)
    assert "run --stage score_select_best --repair 1" in message
    run_stages(cfg, RunOptions((scored.name,), resume=True, repair=1))
    assert output(tmp_path) == before and len(teacher.requests) == num_requests
    assert scored.done() and not list(generated.path.glob("*/shard-*"))

    scored.drop(1)  # its mark is missing, as in a damaged folder
    with pytest.raises(UserError, match="`run --stage score_select_best --repair 1` makes both"):
        run_stages(cfg, RunOptions((scored.name,), resume=True))
    run_stages(cfg, RunOptions((scored.name,), resume=True, repair=1))
    assert output(tmp_path) == before and len(teacher.requests) == num_requests


def test_candidates_that_are_to_be_stored_stay(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    final = {"num_candidates": 6, "store_candidates": True}
    cfg = config(tmp_path, teacher, metricx).model_copy(deep=True)
    cfg.final_generation = cfg.final_generation.model_copy(update=final)
    run_stages(cfg, RunOptions(tuple(NAMES)))
    assert all(len(r["candidates"]) == 6 for r in records(tmp_path, "generate_128"))


def test_a_view_is_written_once_and_the_rejected_only_grow(tmp_path):
    cfg = output_kit.config(tmp_path)
    output_kit.make_run(tmp_path)
    rejected = tmp_path / "rejected.jsonl"
    view, state = tmp_path / "prefilter_candidates.jsonl", tmp_path / ".views.json"
    left = [temporary_of(path) for path in (view, state)]  # of a driver that was killed
    for path in left:
        path.write_bytes(b"{")
    assert output_kit.views_of(cfg, "select_sources") == [rejected]
    first = rejected.read_bytes()
    assert output_kit.views_of(cfg, "prefilter_score") == [view]
    assert not [path for path in left if path.exists()]
    assert output_kit.views_of(cfg, "prefilter_score") == []
    output_kit.run_filter(cfg)
    inode = rejected.stat().st_ino
    rejected.write_bytes(first + b'{"torn')  # a driver was killed while it appended
    assert output_kit.views_of(cfg, "format_filter") == [rejected]
    content = rejected.read_bytes()
    assert content.startswith(first) and rejected.stat().st_ino == inode
    assert [json.loads(line)["stage"] for line in content.splitlines()[2:]] == ["format_filter"] * 2
    assert output_kit.views_of(cfg, "format_filter") == []
    state.unlink()
    output_kit.views_of(cfg, "format_filter")
    assert rejected.read_bytes() == content


def test_a_stage_made_anew_replaces_what_it_rejected_before(tmp_path):
    output_kit.make_run(tmp_path)
    cfg = output_kit.config(tmp_path)
    output_kit.run_filter(cfg)
    output_kit.views_of(cfg, "format_filter")
    lenient = output_kit.config(tmp_path, filters={"rule_based": False})
    output_kit.run_filter(lenient, overwrite=True)
    output_kit.views_of(lenient, "format_filter")
    stages = [r["stage"] for r in read_records(tmp_path / "rejected.jsonl")]
    assert stages == ["select_sources"] * 2


def test_large_views_are_printed_and_not_written(tmp_path):
    cfg = output_kit.config(tmp_path, run={"view_records": 3})
    output_kit.make_run(tmp_path)
    (tmp_path / "prefilter_candidates.jsonl").write_text("of an earlier, smaller run")
    lines = []
    output_kit.run_filter(cfg, print_line=lines.append)
    for stage in ("prefilter_score", "format_filter"):
        output_kit.views_of(cfg, stage, lines.append)
    assert not list(tmp_path.glob("*.jsonl"))
    assert any("`scorekit synth show rejected` prints them" in line for line in lines)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))

    def show_records(view_name):
        result = CliRunner().invoke(app, ["show", view_name, "--config", str(path)])
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    assert show_records("prefilter_candidates") == records(tmp_path, "prefilter_score")
    assert show_records("format_filter") == records(tmp_path, "format_filter")
    assert [r["reason_code"] for r in show_records("rejected")] == ["not_selected"] * 2 + [
        "meta_phrase"
    ] * 2
    wrong = CliRunner().invoke(app, ["show", "nothing", "--config", str(path)])
    assert wrong.exit_code == 2 and "give one of rejected, prefilter_candidates" in wrong.output
