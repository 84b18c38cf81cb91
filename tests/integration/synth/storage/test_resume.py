"""Check resumed runs: with other services or processes, or after an interrupted cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace

import pytest
import yaml

import synth.execution.clients
import synth.storage.store
from scorekit.errors import ScorekitError, UserError
from scorekit.files import temporary_of
from scorekit.locks import hold_locks, try_lock
from scorekit.server.fake import FakeBackend
from synth.__main__ import how_to_resume
from synth.execution.driver import run_map_stage
from synth.execution.stage import StageIncomplete
from synth.execution.stage_start import clear, requested_manifest
from synth.pairs import write_dataset
from synth.run import RunOptions, run_stages
from synth.stages.sample_sources import SampleSources
from synth.stages.table import ORDER
from synth.storage.store import StageFolder
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import free_port, running_service
from tests.kits.synth import output as output_kit
from tests.kits.synth.driver import (
    NAMES,
    STAGES,
    TEXTS,
    config,
    korean,
    output,
    prepared,
    records,
    run,
    write_sources,
)

PREFILTER = STAGES[:1]


class Revised(FakeBackend):
    """The same service with another model behind the same name."""

    def load(self):
        return replace(super().load(), revision="another")


def test_a_resumed_stage_mixes_no_scores_of_two_revisions(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=PREFILTER, shard_id=0, num_shards=2)
    with running_service(Revised("metricx")) as url:
        cfg.metricx.url = url
        with pytest.raises(UserError, match="revision was fake, is another"):
            run(cfg, stages=PREFILTER, resume=True)
        run(cfg, stages=PREFILTER, overwrite=True)
    service_info = json.loads((tmp_path / "service-metricx.json").read_bytes())
    assert service_info["revision"] == "another"


def test_a_shard_has_one_process_at_a_time_and_the_other_waits(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    path = StageFolder(tmp_path, "prefilter_score").lock(1)
    foreign_lock = try_lock(path)
    lines = []

    def print_line(line):  # the other driver dies as soon as this one waits for it
        lines.append(line)
        assert StageFolder(tmp_path, "prefilter_score").mark(1) is None
        foreign_lock.close()

    run(cfg, stages=PREFILTER, print_line=print_line)
    assert len(records(tmp_path, "prefilter_score")) == 20
    (line,) = lines
    assert f"waits for process {os.getpid()}" in line and not path.exists()


def test_what_a_killed_driver_was_writing_goes_and_what_another_may_be_writing_stays(
    tmp_path, teacher, metricx
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=PREFILTER, shard_id=0, num_shards=2)  # the even ones
    folder = StageFolder(tmp_path, "prefilter_score")
    mark = folder.shard(1).with_name("done-00001.json")
    leftover_files = [temporary_of(path) for path in (folder.shard(1), folder.rejected(1), mark)]
    cleared = folder.path.with_name(f".{folder.name}.gone")
    shutil.copytree(folder.path, cleared)
    # A process that works on another shard does not lock these.
    foreign_files = [
        temporary_of(path) for path in (mark.with_name("done-00002.json"), folder.path / "x")
    ]
    for path in (*leftover_files, *foreign_files):
        path.write_bytes(b"{")
    run(cfg, stages=PREFILTER, resume=True)
    assert folder.done()
    assert not [path for path in (*leftover_files, cleared) if path.exists()]
    assert all(path.exists() for path in foreign_files)


def test_a_dataset_of_pairs_is_put_together_by_one_process_at_a_time(tmp_path, monkeypatch):
    pairs = [{"src_lang": "eng", "tgt_lang": "kor"}, {"src_lang": "eng", "tgt_lang": "de"}]
    cfg = output_kit.config(tmp_path, data={"src_lang": "", "tgt_lang": "", "pairs": pairs})
    foreign_lock = try_lock(tmp_path / ".locks" / "dataset.lock")
    lines = []

    class Log:
        def info(self, line):
            lines.append(line)
            foreign_lock.close()

    monkeypatch.setattr("synth.pairs.log", Log())
    assert write_dataset(cfg, RunOptions(("export",))) is None  # no pair is exported
    (line,) = lines
    assert f"waits for process {os.getpid()}" in line


def test_a_finished_stage_needs_no_service(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=PREFILTER)
    cfg.teacher.base_url = cfg.metricx.url = f"http://127.0.0.1:{free_port()}"
    run(cfg, stages=PREFILTER, resume=True)


def test_parts_of_a_merge_that_was_killed_while_it_cleaned_up_go(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    folder = StageFolder(tmp_path, "sample_sources")
    manifest = requested_manifest(SampleSources(), cfg, (tmp_path / "new",), None)
    folder.set_manifest({**manifest, "shards": folder.shards()})
    parts = folder.path / "parts"
    parts.mkdir()
    (parts / "file-00000.jsonl").write_text("{}")
    before = records(tmp_path, "sample_sources")
    run_stages(cfg, RunOptions(("sample_sources",), resume=True))
    assert not parts.exists() and records(tmp_path, "sample_sources") == before


def test_overwriting_a_stage_takes_what_later_ones_left(tmp_path):
    cfg = output_kit.config(tmp_path)
    output_kit.make_run(tmp_path)
    output_kit.run_filter(cfg)
    output_kit.run_export(cfg)
    view = tmp_path / "final_candidates_topk.jsonl"
    view.write_text("")
    clear(tmp_path, ORDER[3], ORDER[4:])
    assert not (tmp_path / "export").exists() and not view.exists()
    assert {path.name for path in tmp_path.glob("stages/*")} == {
        "sample_sources",
        "prefilter_score",
        "select_sources",
    }


def test_a_clearing_that_was_killed_leaves_nothing_to_go_on_with(
    tmp_path,
    teacher,
    metricx,
    monkeypatch,
):
    write_sources(tmp_path, TEXTS)
    run(config(tmp_path, teacher, metricx))
    hotter = config(tmp_path, teacher, metricx, teacher__generation={"final_temperature": 0.7})

    def die(folder, **_):
        if folder.exists():
            (folder / "stage.json").unlink()  # the first file to be written
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("scorekit.files.shutil.rmtree", die)
        prepared(STAGES[2], hotter, overwrite=True)
    run(hotter, stages=STAGES[2:3], resume=True)
    fresh = tmp_path / "fresh"
    write_sources(fresh, TEXTS)
    run(config(fresh, teacher, metricx, teacher__generation={"final_temperature": 0.7}))
    assert records(tmp_path, "generate_128") == records(fresh, "generate_128")


def test_one_of_several_machines_clears_nothing(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=PREFILTER, shard_id=0, num_shards=2)
    with pytest.raises(UserError, match="what all machines have made"):
        run(cfg, stages=PREFILTER, shard_id=1, num_shards=2, overwrite=True)
    assert StageFolder(tmp_path, "prefilter_score").mark(0)


def test_one_stage_of_one_machine_ends_with_its_own_shards(tmp_path, teacher, metricx, capsys):
    write_sources(tmp_path, TEXTS)
    run_stages(config(tmp_path, teacher, metricx), RunOptions(("prefilter_score",), num_shards=2))
    assert "other machines' shards are not done" in capsys.readouterr().err


def test_several_stages_of_one_machine_take_the_shards_that_nobody_is_at(
    tmp_path,
    teacher,
    metricx,
    undisturbed,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run_stages(cfg, RunOptions(tuple(NAMES), shard_id=1, num_shards=2))
    assert output(tmp_path) == output(undisturbed)


def test_nothing_is_cleared_under_a_driver_that_reads_it(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=PREFILTER)
    with hold_locks([(StageFolder(tmp_path, "prefilter_score").lock(), True)], "read it"):
        with pytest.raises(UserError, match="cannot clear it"):
            run(cfg, stages=PREFILTER, overwrite=True)
    run(cfg, stages=PREFILTER, overwrite=True)


def test_a_stage_that_is_cleared_before_its_lock_is_taken_is_begun_whole_or_not_at_all(
    tmp_path,
    teacher,
    metricx,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=STAGES[:2])
    stage = STAGES[0]
    manifest, work = prepared(stage, cfg, resume=True)
    clear(tmp_path, STAGES[0], [STAGES[1]])  # another process's --overwrite
    asyncio.run(run_map_stage(stage, manifest, work))
    assert StageFolder(tmp_path, "prefilter_score").done()
    run(cfg, stages=STAGES[1:2])
    manifest, work = prepared(STAGES[2], cfg, resume=True)
    clear(tmp_path, STAGES[0], [STAGES[1]])
    with pytest.raises(UserError, match="Run --stage select_sources first"):
        asyncio.run(run_map_stage(STAGES[2], manifest, work))
    cfg.prefilter.rank_by = "overall"
    run(cfg, stages=STAGES[:2])
    with pytest.raises(UserError, match="another process has cleared it"):
        asyncio.run(run_map_stage(STAGES[2], manifest, work))


def test_the_kept_config_has_no_credentials_and_is_the_one_that_ran(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    for section in (cfg.teacher, cfg.metricx):
        key = "base_url" if section is cfg.teacher else "url"
        setattr(section, key, getattr(section, key).replace("http://", "http://user:secret@"))
    cfg.filters.llm_judge.url = ["http://user:secret@localhost:1"]
    run_stages(cfg, RunOptions(("prefilter_score",)))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path
    other = cfg.model_copy(deep=True)
    other.teacher.generation.top_p = 0.5
    with pytest.raises(UserError, match="top_p was 1"):
        run_stages(other, RunOptions(("prefilter_score",), resume=True))
    stored_config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored_config["teacher"]["generation"]["top_p"] == 1.0


def test_a_teacher_that_fails_is_named_without_its_password(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    cfg.teacher.base_url = cfg.teacher.base_url.replace("http://", "http://user:secret@")
    teacher.fail(500, times=None)
    with pytest.raises(ScorekitError) as error_info:
        run_stages(cfg, RunOptions(("prefilter_score",)))
    assert "the teacher" in str(error_info.value) and "secret" not in str(error_info.value)


def test_one_source_that_the_teacher_cannot_bear_stays_open_until_it_is_given_up(
    tmp_path,
    metricx,
):
    def respond(body, seed):
        if "number 3 " in body["messages"][-1]["content"]:
            raise RuntimeError("the engine fell over")
        return korean(body, seed)

    fake = FakeOpenAI(respond=respond)
    with fake.running() as fake.url:
        write_sources(tmp_path, TEXTS)
        cfg = config(tmp_path, fake, metricx)
        cfg.teacher.wait_for_server_s = 60  # a broken connection is not tested here
        with pytest.raises(
            StageIncomplete, match=r"1 records are left open \(teacher_server_error 1\)"
        ):
            run(cfg, stages=PREFILTER)
        folder = StageFolder(tmp_path, "prefilter_score")
        assert folder.missing() == [0]  # the others of its shard are requested once
        num_requests = len(fake.requests)
        run(cfg, stages=PREFILTER, resume=True, give_up=True)
        assert len(fake.requests) - num_requests <= 2 * cfg.teacher.retry.max_attempts
    rejected = list(folder.all_rejected())
    assert [(r["source_text"], r["reason_code"]) for r in rejected] == [
        (TEXTS[3], "teacher_server_error")
    ]


@pytest.mark.parametrize("status", [400, 500])
def test_a_teacher_that_fails_everybody_stops_the_run_and_uses_up_no_source(
    tmp_path,
    metricx,
    monkeypatch,
    status,
):
    monkeypatch.setattr(synth.execution.clients, "FAILURES_IN_A_ROW", 5)
    fake = FakeOpenAI(respond=korean)
    with fake.running() as fake.url:
        write_sources(tmp_path, TEXTS)
        cfg = config(tmp_path, fake, metricx)
        fake.fail(status, times=None)
        with pytest.raises(ScorekitError, match="the teacher failed 5 requests in a row"):
            run_stages(cfg, RunOptions(("prefilter_score",)))
        fake.well()
        run_stages(cfg, RunOptions(("prefilter_score",), resume=True))
    assert len(records(tmp_path, "prefilter_score")) == 20


def test_a_stage_that_lets_nothing_through_ends_the_run(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.cut = True
    with pytest.raises(UserError, match=r"no record was accepted \(greedy_cut 20\)"):
        run_stages(cfg, RunOptions(("prefilter_score", "select_sources")))
    teacher.well()
    assert StageFolder(tmp_path, "select_sources").manifest() is None


@pytest.mark.parametrize(
    ("command_line", "resume_command"),
    [
        ("run --config c.yaml --stage all", "run --config c.yaml --stage all --resume"),
        (
            "run --config c.yaml --stage all --dry-run --limit 5 --overwrite",
            "run --config c.yaml --stage all --dry-run --limit 5 --resume",
        ),
        (
            "run --config 'a b.yaml' --stage export --resume --set run.seed=3 --num-shards 2",
            "run --config 'a b.yaml' --stage export --set run.seed=3 --num-shards 2 --resume",
        ),
    ],
)
def test_the_line_that_says_how_to_resume_is_the_same_command(command_line, resume_command):
    import shlex

    resumed = how_to_resume("scorekit synth", shlex.split(command_line))
    assert resumed == f"scorekit synth {resume_command}"


@pytest.fixture
def judged(tmp_path):
    """Return a config of a judge whose LLM can be down, and that LLM."""
    llm = FakeOpenAI(
        "teacher", respond=lambda *_: '{"pass": true, "reason_code": "ok", "notes": ""}'
    )
    with llm.running() as upstream, running_judge(upstream=upstream) as url:
        output_kit.make_run(tmp_path)
        filters = {"rule_based": False, "llm_judge": {"enabled": True, "url": url}}
        cfg = output_kit.config(tmp_path, filters=filters)
        yield cfg, llm


def test_a_judge_whose_llm_is_away_for_a_while_rejects_nothing(judged):
    cfg, llm = judged
    cfg.teacher.retry.backoff_s = [0.02] * 60  # longer than any sample can fail
    llm.fail(503, times=45)
    progress = output_kit.run_filter(cfg)
    assert progress.stats.records_out == 10 and not progress.stats.rejected


def test_a_judge_whose_llm_stays_away_stops_the_run_and_is_asked_again(judged, monkeypatch):
    cfg, llm = judged
    monkeypatch.setattr(synth.execution.clients, "FAILURES_IN_A_ROW", 3)
    cfg.teacher.retry.backoff_s = [0.01, 0.01]
    llm.fail(503, times=None)
    with pytest.raises(ExceptionGroup) as error_info:
        output_kit.run_filter(cfg)
    assert error_info.group_contains(ScorekitError, match="the judge failed 3 requests in a row")
    llm.well()
    assert output_kit.run_filter(cfg, resume=True).stats.records_out == 10
