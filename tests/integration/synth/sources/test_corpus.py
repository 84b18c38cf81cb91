"""Check the messages of the command about its corpus: unreadable documents, evaluation sets."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from typer.testing import CliRunner

from demo.madlad_shard import documents
from scorekit.config import load_config
from synth.__main__ import app
from synth.config import SynthConfig
from synth.export.manifest import corpus
from synth.report.page import write_report
from synth.storage.store import StageFolder


def invoke(tmp_path, *arguments):
    command = ["run", "--config", str(tmp_path / "c.yaml"), "--stage", "sample_sources"]
    return CliRunner().invoke(app, [*command, *arguments])


def prepare(tmp_path, *broken):
    lines = [json.dumps({"text": text}) for text in documents("ko", 0, 6)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, *broken]) + "\n")
    config = {
        "run": {"out_dir": str(tmp_path / "run")},
        "data": {
            "src_lang": "kor",
            "tgt_lang": "eng",
            "files": [str(tmp_path / "a.jsonl")],
            "sample_pool_size": 50,
            "max_unreadable": 0.5,
        },
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))


def test_documents_that_cannot_be_read_are_told_of_everywhere(tmp_path):
    prepare(tmp_path, '{"text": ', '{"txt": "?"}')
    result = invoke(tmp_path)
    assert result.exit_code == 0
    last = result.stderr.splitlines()[-2]
    assert last.startswith("warning: 2 documents could not be read (broken_json 1, no_text 1)")
    stats = json.loads((tmp_path / "run/stats.json").read_bytes())["stages"]["sample_sources"]
    assert stats["unreadable"] == {"broken_json": 1, "no_text": 1}
    cfg = load_config(SynthConfig, tmp_path / "c.yaml")
    corpus_stats = corpus([cfg.run.out_dir], "sample_sources")
    assert corpus_stats["unreadable"] == stats["unreadable"] and corpus_stats["documents"] == 6
    page = write_report(tmp_path / "run").read_text()
    assert "broken_json" in page and "line 7" in page


def test_a_corpus_that_was_mended_is_read_again_when_the_run_is_resumed(tmp_path):
    prepare(tmp_path, *['{"text": '] * 7)
    message = "7 of 13 documents could not be read (broken_json 7)"
    for flags in ((), ("--resume",)):
        result = invoke(tmp_path, *flags)
        assert result.exit_code == 2 and message in result.stderr and "--resume" in result.stderr
    prepare(tmp_path)
    result = invoke(tmp_path, "--resume")
    assert result.exit_code == 0 and "could not be read" not in result.stderr


def test_a_corpus_in_which_nothing_was_found_is_read_again_when_the_run_is_resumed(tmp_path):
    prepare(tmp_path)
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_text("")
    assert invoke(tmp_path).exit_code == 2
    (tmp_path / "a.jsonl").write_bytes(content)
    assert invoke(tmp_path, "--resume").exit_code == 0


@pytest.mark.parametrize(
    "line", ["[" * 100_000, json.dumps({"text": "A sentence stands here.", "url": "\ud800"})]
)
def test_a_line_that_nobody_can_read_or_write_is_counted(line, tmp_path):
    prepare(tmp_path, line)
    result = invoke(tmp_path)
    assert (
        result.exit_code == 0 and "1 documents could not be read (broken_json 1)" in result.stderr
    )


def test_a_file_whose_name_is_not_unicode_is_named_in_a_line(tmp_path):
    prepare(tmp_path)
    (tmp_path / "a.jsonl").rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    result = invoke(tmp_path, "--set", f"data.files=['{tmp_path}/*.jsonl']")
    assert result.exit_code == 2 and "its name is not UTF-8" in result.stderr


def test_a_corpus_that_can_be_read_is_no_cause_for_a_warning(tmp_path):
    prepare(tmp_path)
    result = invoke(tmp_path)
    assert result.exit_code == 0 and "warning" not in result.stderr


def test_evaluation_sets_may_be_named_on_the_command_line(tmp_path):
    prepare(tmp_path)
    assert invoke(tmp_path).exit_code == 0
    source = next(iter(StageFolder(tmp_path / "run", "sample_sources").records()))
    (tmp_path / "set.txt").write_text(source["source_text"].replace("\n", " "))
    options = ("--decontaminate", str(tmp_path / "set.txt"))
    result = invoke(tmp_path, "--resume", *options)
    assert result.exit_code == 2 and "decontaminate was None, is ['set.txt:" in result.stderr
    result = invoke(tmp_path, "--overwrite", "--yes", *options)
    assert result.exit_code == 0 and "contaminated: It stands" in result.stderr
    result = invoke(tmp_path, "--resume", "--decontaminate", str(tmp_path / "gone.txt"))
    assert result.exit_code == 2 and "gone.txt: No such file" in result.stderr
