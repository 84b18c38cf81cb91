"""Check disk errors: full, torn, not writable. Each is one line, exit code 2, and a way to
continue."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from typer.testing import CliRunner

from synth.__main__ import app
from synth.storage.store import StageFolder
from testing.corpus import export_bytes, write_corpus
from tests.kits import forked
from tests.kits.synth.driver import config, is_paid


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl.gz"
    write_corpus(path, 30)
    return path


def arguments(folder, corpus, teacher, metricx):
    """Return the command for all stages of a run in this folder."""
    cfg = config(
        folder,
        teacher,
        metricx,
        data__files=[str(corpus)],
        data__sample_pool_size=20,
        filters__llm_judge={"enabled": False},
        filters__rule_based=False,
    )
    path = folder.parent / f"{folder.name}.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return ["run", "--config", str(path), "--stage", "all"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, teacher, metricx):
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = CliRunner().invoke(app, arguments(folder, corpus, teacher, metricx))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copied_run(finished, corpus, tmp_path, teacher, metricx):
    """Return (a finished run, the command that resumes it)."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run", [*arguments(tmp_path / "run", corpus, teacher, metricx), "--resume"]


def count_translations(teacher):
    """Return how many translations were requested."""
    return sum(is_paid(request.body) for request in teacher.requests)


def error_line(done) -> str:
    """Return the one line that a command ended with."""
    assert done.exit_code == 2, done.output
    error_lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error_lines) == 1 and "Traceback" not in done.output
    return error_lines[0]


@pytest.mark.parametrize(
    "max_file_bytes",
    [
        300,
        pytest.param(9_000, marks=pytest.mark.slow),
        pytest.param(60_000, marks=pytest.mark.slow),
    ],
)
def test_a_disk_without_room_ends_the_run_in_a_line_and_room_lets_it_go_on(
    max_file_bytes,
    finished,
    corpus,
    tmp_path,
    teacher,
    metricx,
):
    command = arguments(tmp_path / "run", corpus, teacher, metricx)

    def invoke(*words):
        return forked.run([sys.executable, "-m", *words], text=True, capture_output=True)

    # The limit is for every file; a larger one fails with EFBIG.
    full = invoke("tests.kits.disk.full", str(max_file_bytes), "synth", *command)
    assert full.returncode == 2, full.stderr
    last_line = full.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: ") and "Traceback" not in full.stderr
    assert str(tmp_path) in last_line and (
        "resume with" in last_line or "free disk space" in last_line.lower()
    )
    assert invoke("synth", *command, "--resume").returncode == 0
    assert export_bytes(tmp_path / "run") == export_bytes(finished)
    assert not list((tmp_path / "run").rglob("*.tmp"))


TORN = [
    ("prefilter_score", "000/done-00000.json", b""),
    ("generate_128", "stage.json", b"{"),
    ("sample_sources", "000/done-00000.json", b"{}\n"),
    ("sample_sources", "counts.json", b'{"rejected'),
]


@pytest.mark.parametrize(("stage", "name", "content"), TORN)
def test_a_torn_file_of_a_run_is_named_with_what_to_do(stage, name, content, copied_run):
    folder, command = copied_run
    path = StageFolder(folder, stage).path / name
    path.write_bytes(content)
    line = error_line(CliRunner().invoke(app, command))
    assert f"{path}: it is damaged" in line
    status = CliRunner().invoke(app, ["status", *command[1:3]])
    assert error_line(status) == line
    assert (
        str(path) in CliRunner().invoke(app, ["repair", *command[1:3]]).stdout or "counts" in name
    )


@pytest.mark.parametrize("stage", ["sample_sources", "prefilter_score", "select_sources"])
@pytest.mark.parametrize("damage", ["torn", "a number", "gone", "a shard"])
def test_what_is_told_of_a_damaged_stage_mends_it(stage, damage, copied_run, finished, teacher):
    folder, command = copied_run
    files = StageFolder(folder, stage)
    mark = files.path / "000" / "done-00000.json"
    if damage == "torn":
        mark.write_bytes(b"{")
    elif damage == "a number":  # fewer records would be taken
        mark.write_bytes(re.sub(rb'"records":(\d+)', rb'"records":1', mark.read_bytes()))
    elif damage == "gone":
        mark.unlink()
    else:
        path = files.shard(0)
        path.write_bytes(path.read_bytes()[:-20])
    num_paid = count_translations(teacher)
    if damage != "gone" or stage != "prefilter_score":  # its shards are written one by one
        line = error_line(CliRunner().invoke(app, command))
        assert f"run --stage {stage} --repair 0" in line
        repair_command = [*command[:3], "--stage", stage, "--repair", "0"]
        assert CliRunner().invoke(app, repair_command).exit_code == 0
    shutil.rmtree(folder / "stages" / "export")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)
    assert count_translations(teacher) == num_paid


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize("damage", ["byte", "gone"])
def test_a_changed_file_of_the_export_is_named_and_made_again(name, damage, copied_run, finished):
    folder, command = copied_run
    path = folder / "export" / name
    if damage == "byte":
        path.write_bytes(b"?" + path.read_bytes()[1:])
    else:
        path.unlink()
    line = error_line(CliRunner().invoke(app, command))
    assert str(path) in line and "run --stage export --repair 0" in line
    assert str(path) in CliRunner().invoke(app, ["repair", *command[1:3]]).stdout
    repair_command = [*command[:3], "--stage", "export", "--repair", "0"]
    assert CliRunner().invoke(app, repair_command).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)


@pytest.mark.parametrize("stage", ["sample_sources", "generate_128"])
def test_a_changed_manifest_is_named_and_overwrite_mends_it(stage, copied_run, finished, teacher):
    folder, command = copied_run
    path = StageFolder(folder, stage).path / "stage.json"
    path.write_bytes(re.sub(rb'"shards": \d+', b'"shards": 1', path.read_bytes()))
    line = error_line(CliRunner().invoke(app, command))
    assert f"run --stage {stage} --overwrite" in line
    num_paid = count_translations(teacher)
    overwrite_command = [*command[:3], "--stage", stage, "--overwrite", "--yes"]
    assert CliRunner().invoke(app, overwrite_command).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)
    assert count_translations(teacher) == num_paid


def test_a_mark_of_the_sample_that_is_gone_is_no_other_machines_work(copied_run, finished):
    folder, command = copied_run
    path = StageFolder(folder, "sample_sources").path / "000" / "done-00000.json"
    path.unlink()
    line = error_line(CliRunner().invoke(app, command))
    assert "run --stage sample_sources --repair 0" in line
    repair_command = [*command[:3], "--stage", "sample_sources", "--repair", "0"]
    assert CliRunner().invoke(app, repair_command).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)


@pytest.mark.parametrize("stage", ["sample_sources", "prefilter_score", "generate_128"])
def test_a_stage_folder_that_was_deleted_by_hand_is_made_again(
    stage, copied_run, finished, teacher
):
    folder, command = copied_run
    num_paid = count_translations(teacher)
    shutil.rmtree(folder / "stages" / stage)
    shutil.rmtree(folder / "stages" / "export")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)
    assert count_translations(teacher) == num_paid  # the answers are cached


def test_a_folder_where_the_export_wants_a_file_goes_with_the_old_export(copied_run, finished):
    folder, command = copied_run
    shutil.rmtree(folder / "stages" / "export")
    (folder / "export" / "train.jsonl").unlink()
    (folder / "export" / "train.jsonl").mkdir()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert export_bytes(folder) == export_bytes(finished)


CORPORA = {
    "no file": (None, "corpus.jsonl: no such file"),
    "empty": (b"", "corpus.jsonl: it has no document"),
    "blank lines": (b"\n\n", "corpus.jsonl: it has no document"),
    "no JSON": (b"hello\n", "line 1: Expecting value"),
    "too short": (b'{"text": "ab"}\n', "no source left"),
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_without_a_source_is_a_line(name, tmp_path, teacher, metricx):
    content, message = CORPORA[name]
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_bytes(content)
    command = arguments(tmp_path / "run", path, teacher, metricx)
    assert message in error_line(CliRunner().invoke(app, command))


def test_a_misspelt_name_beside_others_leaves_out_no_share_of_the_corpus(
    tmp_path,
    corpus,
    teacher,
    metricx,
):
    command = arguments(tmp_path / "run", corpus, teacher, metricx)
    files = json.dumps([str(corpus), str(tmp_path / "other.jsonl")])
    done = CliRunner().invoke(app, [*command, "--set", f"data.files={files}"])
    assert "other.jsonl: no such file" in error_line(done)


@pytest.mark.parametrize("existing_name", ["config.yaml", "export/mine.txt", "rejected.jsonl"])
def test_a_folder_that_is_no_runs_is_not_written_over(
    existing_name,
    tmp_path,
    corpus,
    teacher,
    metricx,
):
    folder = tmp_path / "run"
    (folder / existing_name).parent.mkdir(parents=True)
    (folder / existing_name).write_text("mine")
    command = arguments(folder, corpus, teacher, metricx)
    assert f"has {existing_name.split('/')[0]}, but not from a run" in error_line(
        CliRunner().invoke(app, command)
    )
    assert [p for p in folder.rglob("*") if p.is_file()] == [folder / existing_name]
    assert (folder / existing_name).read_text() == "mine"
    (folder / existing_name).rename(folder / "another name")
    assert CliRunner().invoke(app, command).exit_code == 0


@pytest.mark.parametrize("command", [["status"], ["repair"], ["show", "rejected"]])
def test_a_command_about_a_run_that_is_not_there_says_so(command, tmp_path, copied_run):
    _, (_, *options) = copied_run
    elsewhere = ["--set", f"run.out_dir={tmp_path / 'misspelt'}"]
    done = CliRunner().invoke(app, [*command, *options[:2], *elsewhere])
    assert "misspelt: no run here" in error_line(done) and not (tmp_path / "misspelt").exists()


def test_rejected_records_that_were_torn_are_named_and_not_shown(copied_run):
    folder, (_, *options) = copied_run
    path = next(p for p in sorted(folder.rglob("rejected-*.zst")) if p.stat().st_size > 60)
    path.write_bytes(path.read_bytes()[:-20])
    done = CliRunner().invoke(app, ["show", "rejected", *options[:2]])
    assert "has changed since" in error_line(done) or "cannot be read" in error_line(done)
