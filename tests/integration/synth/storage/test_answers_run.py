"""Check that a run pays for nothing twice if teacher, disk or shards fail."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from scorekit.errors import SampleError, UserError
from scorekit.paid.sqlite import SqliteStore
from synth.__main__ import app
from synth.execution import clients as module
from synth.execution.stage import StageIncomplete
from synth.repair import repair
from synth.run import RunOptions, run_stages
from synth.storage.store import ShardWriter, StageFolder, read_records
from tests.kits.synth.driver import (
    NAMES,
    STAGES,
    TEXTS,
    config,
    is_paid,
    output,
    records,
    run,
    write_sources,
)


def test_more_sources_and_candidates_pay_for_what_is_new_alone(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    run(config(tmp_path, teacher, metricx))
    num_before = choices(teacher)
    more = config(tmp_path, teacher, metricx, data__target_examples_total=12)
    run(more, stages=STAGES[1:], overwrite=True)
    assert choices(teacher) - num_before == 2 * 6  # two further sources
    num_before = choices(teacher)
    more.final_generation.num_candidates = 9
    run(more, stages=STAGES[2:], overwrite=True)
    assert choices(teacher) - num_before == 12 * 3  # three further candidates of each
    assert all(len(r["candidates"]) == 9 for r in records(tmp_path, "generate_128"))
    fresh = tmp_path / "fresh"
    write_sources(fresh, TEXTS)
    both = config(fresh, teacher, metricx, data__target_examples_total=12)
    both.final_generation.num_candidates = 9
    run(both)
    assert output(fresh) == output(tmp_path)


def choices(fake):
    return sum(request.body.get("n", 1) for request in fake.requests)


def test_another_revision_of_the_teacher_is_asked_anew(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=STAGES[:1])
    num_before = len(teacher.requests)
    cfg.teacher.revision = "the one of Tuesday"
    run(cfg, stages=STAGES[:1], overwrite=True)
    assert len(teacher.requests) - num_before == 40


def test_a_sick_teacher_leaves_sources_open_and_a_healthy_one_closes_them(
    tmp_path, teacher, metricx, undisturbed, monkeypatch
):
    monkeypatch.setattr("synth.execution.clients.FAILURES_IN_A_ROW", 1000)
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.fail(500, times=60)  # two thirds of all first attempts
    with pytest.raises(StageIncomplete) as error_info:
        run_stages(cfg, RunOptions(tuple(NAMES)))
    assert error_info.value.open["teacher_server_error"] > 3
    assert not list(StageFolder(tmp_path, "prefilter_score").all_rejected())
    assert StageFolder(tmp_path, "select_sources").manifest() is None
    teacher.well()
    run_stages(cfg, RunOptions(tuple(NAMES), resume=True))
    assert output(tmp_path) == output(undisturbed)


def test_the_command_ends_in_three_while_records_are_open(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    command = ["run", "--config", str(path), "--stage", "prefilter_score"]
    teacher.fail(500, times=40, only=is_paid)  # both attempts of all records
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3 and "left open (teacher_server_error" in result.output
    assert "--give-up" in result.output
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0


def test_overwrite_says_what_goes_and_asks(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=STAGES[:2])
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    command = ["run", "--config", str(path), "--stage", "prefilter_score", "--overwrite"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "deletes the records of prefilter_score 20, select_sources 10" in result.output
    assert "paid answers are kept" in result.output
    arguments = [*command, "--set", f"run.answers={tmp_path}/gone.sqlite"]
    assert "gone.sqlite: everything is paid for again" in CliRunner().invoke(app, arguments).output
    assert StageFolder(tmp_path, "select_sources").done()
    assert CliRunner().invoke(app, [*command, "--yes"]).exit_code == 0
    assert not StageFolder(tmp_path, "select_sources").done()


# -- a damaged disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["lines", "byte", "torn", "gone"])
def test_a_changed_shard_is_noticed_named_and_made_again(
    tmp_path, teacher, metricx, undisturbed, damage
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg)
    folder = StageFolder(tmp_path, "prefilter_score")
    path = folder.shard(1)
    content = path.read_bytes()
    if damage == "lines":
        lines = list(read_records(path))[:2]
        with ShardWriter(path) as shard:
            for line in lines:
                shard.write(line)
            shard.commit()
    elif damage == "byte":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.raises(UserError, match="--stage prefilter_score --repair 1"):
        run(cfg, resume=True)
    with pytest.raises(UserError, match="--stage prefilter_score --repair 1"):
        run(cfg, stages=STAGES[1:], overwrite=True)
    assert sum("--repair 1" in line for line in repair(cfg)) == 1
    num_before = len(teacher.requests)
    run_stages(cfg, RunOptions(("prefilter_score",), resume=True, repair=1))
    assert len(teacher.requests) == num_before and path.read_bytes() == content
    run(cfg, resume=True)
    run(cfg, stages=STAGES[1:], overwrite=True)
    assert output(tmp_path) == output(undisturbed)


def test_what_an_upstream_refused_is_no_answer_to_keep():
    refused = SampleError("upstream", "a refused key", retryable=False).wire()
    assert module._is_transient({"ok": False, "error": refused})
    confused = SampleError("model_failure", "no verdict").wire()
    assert not module._is_transient({"ok": False, "error": confused})


def test_nobody_is_asked_any_more_when_an_answer_could_not_be_kept(
    tmp_path, teacher, metricx, monkeypatch
):
    texts = [f"Sentence number {i} is to be translated." for i in range(60)]
    write_sources(tmp_path, texts, per_shard=60)
    cfg = config(tmp_path, teacher, metricx)

    async def full(self, answers):
        raise UserError("database or disk is full")

    monkeypatch.setattr(SqliteStore, "put", full)
    teacher.forget()

    def the_oldest_record_waits_for_all_others(body):
        oldest = body["messages"][-1]["content"].endswith(texts[0])
        return oldest and len(teacher.requests) < len(texts)

    teacher.hang = the_oldest_record_waits_for_all_others
    with pytest.raises(UserError, match="disk is full"):
        run_stages(cfg, RunOptions((NAMES[0],)))
    assert len(teacher.requests) < len(texts)


@pytest.mark.parametrize("failure", [{"refuse_n": True}, {"most_choices": 1}])
def test_a_candidate_that_came_is_kept_whatever_becomes_of_its_neighbours(
    failure, tmp_path, teacher, metricx, undisturbed, monkeypatch
):
    monkeypatch.setattr("synth.execution.clients.FAILURES_IN_A_ROW", 1000)
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=STAGES[:2])
    answered, respond = Counter(), teacher.respond
    sick = True

    def broken_off(body, seed):
        return "abort" if sick and seed % 3 == 0 else "stop"

    def counted(body, seed):
        answered[body["messages"][-1]["content"], seed] += broken_off(body, seed) == "stop"
        return respond(body, seed)

    monkeypatch.setattr(teacher, "respond", counted)
    for name, value in failure.items():
        setattr(teacher, name, value)
    teacher.finish_reason = broken_off
    with pytest.raises(StageIncomplete):
        run_stages(cfg, RunOptions((NAMES[2],)))
    assert answered.total()
    sick = False
    run_stages(cfg, RunOptions(tuple(NAMES[2:]), resume=True))
    assert set(answered.values()) == {1}
    assert output(tmp_path) == output(undisturbed)
