"""What was paid for once is not paid for again, and what is damaged is noticed."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest
import structlog
from typer.testing import CliRunner

from bench.redis_process import running_redis
from scorekit.errors import SampleError, UserError
from synth.__main__ import app
from synth.context import Unfinished
from synth.drive import clients as module
from synth.folder.answers import REDIS_PASSWORD, SqliteAnswers, mend, open_answers
from synth.folder.locks import held
from synth.folder.repair import repair
from synth.folder.store import ShardWriter, StageFolder, digest_of, read_records
from synth.run import RunOptions, run_stages
from tests.integration.test_synth_driver import (  # noqa: F401
    NAMES,
    STAGES,
    TEXTS,
    config,
    metricx,
    output,
    records,
    run,
    teacher,
    undisturbed,
    write_sources,
)


@pytest.fixture(autouse=True)
def own_log():
    """A run sends the log of the process to its folder."""
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


KEYS = [digest_of(i) for i in range(3000)]


def answer(i):
    return {"text": f"번역 {i} " * 20, "finish_reason": "stop"}


def fill(path, numbers=range(3000)):
    async def work():
        answers = SqliteAnswers(path)
        for i in numbers:
            await answers.put({KEYS[i]: answer(i)})
        await answers.close()

    asyncio.run(work())


def read(path, keys=KEYS):
    async def work():
        answers = open_answers(path)
        try:
            return await answers.get(keys), answers.damaged
        finally:
            await answers.close()

    return asyncio.run(work())


# -- the store -------------------------------------------------------------------------------------


KILLED = (
    "import asyncio, os, pathlib, signal, sys\n"
    "from tests.integration.test_synth_answers import KEYS, SqliteAnswers, answer\n"
    "async def work():\n"
    "    answers = SqliteAnswers(pathlib.Path(sys.argv[1]))\n"
    "    for i in range(50): await answers.put({KEYS[i]: answer(i)})\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "asyncio.run(work())"
)


def test_an_answer_outlives_a_process_that_is_killed(tmp_path):
    path = tmp_path / "answers.sqlite"
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    assert read(path) == ({KEYS[i]: answer(i) for i in range(50)}, 0)


def test_null_is_an_answer_too_and_a_new_one_takes_the_place_of_the_old(tmp_path):
    async def work():
        answers = SqliteAnswers(tmp_path / "answers.sqlite")
        await answers.put({KEYS[0]: None, KEYS[1]: "a"})
        await answers.put({KEYS[1]: "b"})
        return await answers.get(KEYS[:3])

    assert asyncio.run(work()) == {KEYS[0]: None, KEYS[1]: "b"}


def test_a_damaged_value_is_no_answer_and_hides_no_other(tmp_path):
    path = tmp_path / "answers.sqlite"
    fill(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE answers SET value = x'00' || substr(value, 2) WHERE id = 7")
    db.commit()
    db.close()
    found, damaged = read(path)
    assert damaged == 1 and found == {KEYS[i]: answer(i) for i in range(3000) if i != 6}


def damage(path, fault):
    content = bytearray(path.read_bytes())
    if fault == "header":
        content[:100] = b"\xff" * 100
    elif fault == "a page":
        content[len(content) // 2 : len(content) // 2 + 4096] = b"\xff" * 4096
    elif fault == "the last page":
        content[-4096:] = b"\xff" * 4096
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "fault, kept_at_least",
    [("header", 3000), ("a page", 2800), ("the last page", 2800), ("the second half", 1000)],
)
def test_all_that_can_be_read_of_a_damaged_file_is_kept(tmp_path, fault, kept_at_least):
    path = tmp_path / "answers.sqlite"
    fill(path)
    damage(path, fault)
    kept, _ = mend(path)
    assert kept >= kept_at_least
    found, damaged = read(path)
    assert len(found) == kept and not damaged
    assert all(found[KEYS[i]] == answer(i) for i in range(3000) if KEYS[i] in found)
    assert path.with_name("answers.sqlite.damaged").exists()
    assert mend(path) == (kept, None)  # nothing is wrong any more


def test_a_flip_of_any_bit_costs_one_answer_at_most(tmp_path):
    path = tmp_path / "answers.sqlite"
    long = {"text": "긴 번역 " * 2000, "finish_reason": "stop"}  # in overflow pages

    async def work():
        answers = SqliteAnswers(path)
        await answers.put({KEYS[i]: long if i % 40 == 0 else answer(i) for i in range(400)})
        await answers.close()

    asyncio.run(work())
    whole = path.read_bytes()
    rng = random.Random(7)
    for place in (*range(0, 100, 10), *(rng.randrange(len(whole)) for _ in range(60))):
        content = bytearray(whole)
        content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        kept, _ = mend(path)
        assert kept >= 399, place
        found, _ = read(path, KEYS[:400])
        assert all(found[k] in (long, answer(i)) for i, k in enumerate(KEYS[:400]) if k in found)


def test_what_a_killed_process_left_in_the_log_is_kept_though_the_log_is_damaged(tmp_path):
    path = tmp_path / "answers.sqlite"
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode == -9
    log = path.with_name("answers.sqlite-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1  # SQLite takes nothing behind it
    log.write_bytes(content)
    kept, _ = mend(path)
    assert kept >= 49
    found, damaged = read(path)
    assert len(found) == kept and not damaged


def test_a_file_in_use_is_not_mended_and_one_that_is_mended_not_used(tmp_path):
    path = tmp_path / "answers.sqlite"
    fill(path, range(3))
    answers = SqliteAnswers(path)
    with pytest.raises(UserError, match="at work there"):
        mend(path)
    asyncio.run(answers.close())
    with held([(path.with_name("answers.sqlite.lock"), False)], "mend it"):
        with pytest.raises(UserError, match="is being mended"):
            open_answers(path)
    assert mend(path) == (3, None) and not path.with_name("answers.sqlite.damaged").exists()


def test_a_file_that_is_deleted_under_a_run_is_noticed(tmp_path):
    path = tmp_path / "answers.sqlite"

    async def work():
        answers = SqliteAnswers(path)
        await answers.put({KEYS[0]: 1})
        path.unlink()
        await answers.put({KEYS[1]: 1})

    with pytest.raises(UserError, match="was deleted or replaced"):
        asyncio.run(work())


def test_a_full_disk_is_said_and_loses_nothing_that_was_kept(tmp_path):
    path = tmp_path / "answers.sqlite"
    code = (
        "import asyncio, pathlib, resource, sys\n"
        "from tests.integration.test_synth_answers import KEYS, SqliteAnswers, answer\n"
        "async def work():\n"
        "    answers = SqliteAnswers(pathlib.Path(sys.argv[1]))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "    for i in range(3000):\n"
        "        await answers.put({KEYS[i]: answer(i)})\n"
        "        print(i, flush=True)\n"
        "asyncio.run(work())"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "UserError: run.answers" in done.stderr and "make room" in done.stderr
    kept = len(done.stdout.split())
    found, damaged = read(path)
    assert kept > 10 and not damaged
    assert {KEYS[i]: answer(i) for i in range(kept)}.items() <= found.items()


def test_what_is_no_sqlite_file_is_said_in_one_line(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"not a database, but long enough to be one" * 100)
    with pytest.raises(UserError, match="file is not a database"):
        open_answers(path)


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "answers.sqlite"
    code = (
        "import sys, pathlib\n"
        "from tests.integration.test_synth_answers import fill\n"
        "fill(pathlib.Path(sys.argv[1]), range(int(sys.argv[2]), 300, 3))"
    )
    work = [subprocess.Popen([sys.executable, "-c", code, path, str(i)]) for i in range(3)]
    assert [process.wait() for process in work] == [0, 0, 0]
    assert len(read(path)[0]) == 300


@pytest.mark.parametrize(
    "url", ["redis://user:geheim@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password=geheim"]
)
def test_no_password_is_taken_from_a_url_nor_kept_anywhere(tmp_path, url):
    with pytest.raises(UserError, match=REDIS_PASSWORD):
        open_answers(url)
    path = tmp_path / "c.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"out_dir": str(tmp_path / "run"), "answers": url},
                "data": {"src_lang": "eng", "tgt_lang": "kor"},
            }
        )
    )
    done = CliRunner().invoke(app, ["run", "--config", str(path), "--stage", "all"])
    assert done.exit_code == 2 and REDIS_PASSWORD in done.output
    assert "geheim" not in done.output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1/x", "redis://127.0.0.1:port/0", "postgres://h"]
)
def test_what_is_no_place_of_answers_is_said_in_one_line(place):
    with pytest.raises(UserError, match="give a path, redis://"):
        open_answers(place)


def test_machines_share_a_redis(monkeypatch):
    monkeypatch.setenv(REDIS_PASSWORD, "geheim")

    async def work(url):
        first, second = open_answers(url), open_answers(url)
        await first.put({KEYS[0]: answer(0), KEYS[1]: answer(1)})
        raw = await second._db.get(b"synth:" + bytes.fromhex(KEYS[1]))
        await second._db.set(b"synth:" + bytes.fromhex(KEYS[1]), raw[:-1] + b"?")
        found = await second.get(KEYS[:3])
        for each in (first, second):
            await each.close()
        return found, second.damaged

    with running_redis("--requirepass", "geheim") as redis:
        assert asyncio.run(work(redis.url)) == ({KEYS[0]: answer(0)}, 1)


def test_a_redis_that_may_evict_is_refused_and_one_that_is_away_said():
    with running_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as redis:
        with pytest.raises(UserError, match="maxmemory-policy allkeys-lru"):
            open_answers(redis.url)
    with pytest.raises(UserError, match="start it"):
        open_answers(redis.url)


def test_a_redis_that_is_restarted_is_waited_for():
    async def work(redis):
        answers = open_answers(redis.url)
        await answers.put({KEYS[0]: 1})
        redis.kill()
        writing = asyncio.create_task(answers.put({KEYS[1]: 2}))
        reading = asyncio.create_task(answers.get(KEYS[2:3]))
        await asyncio.sleep(0)
        await asyncio.to_thread(redis.start)
        await asyncio.gather(writing, reading)
        found = await answers.get(KEYS[1:2])
        await answers.close()
        return found

    with running_redis() as redis:
        assert asyncio.run(work(redis)) == {KEYS[1]: 2}


# -- a run -----------------------------------------------------------------------------------------


def test_more_sources_and_candidates_pay_for_what_is_new_alone(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    run(config(tmp_path, teacher, metricx))
    asked = choices(teacher)
    more = config(tmp_path, teacher, metricx, data__target_examples_total=12)
    run(more, stages=STAGES[1:], overwrite=True)
    assert choices(teacher) - asked == 2 * 6  # two further sources
    asked = choices(teacher)
    more.final_generation.num_candidates = 9
    run(more, stages=STAGES[2:], overwrite=True)
    assert choices(teacher) - asked == 12 * 3  # three further candidates of each
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
    asked = len(teacher.requests)
    cfg.teacher.revision = "the one of Tuesday"
    run(cfg, stages=STAGES[:1], overwrite=True)
    assert len(teacher.requests) - asked == 40


def test_a_sick_teacher_leaves_sources_open_and_a_healthy_one_closes_them(
    tmp_path,
    teacher,
    metricx,
    undisturbed,
    monkeypatch,
):
    monkeypatch.setattr("synth.drive.clients.FAILURES_IN_A_ROW", 1000)
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    teacher.fail(500, times=60)  # two thirds of all first tries
    with pytest.raises(Unfinished) as failed:
        run_stages(cfg, RunOptions(tuple(NAMES)))
    assert failed.value.open["teacher_server_error"] > 3
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
    teacher.fail(500, times=16)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 3 and "left open (teacher_server_error" in done.output
    assert "--give-up" in done.output
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0


def test_overwrite_says_what_goes_and_asks(tmp_path, teacher, metricx):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg, stages=STAGES[:2])
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    command = ["run", "--config", str(path), "--stage", "prefilter_score", "--overwrite"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "throws away records of prefilter_score 20, select_sources 10" in done.output
    assert "answers that were paid for are kept" in done.output
    told = [*command, "--set", f"run.answers={tmp_path}/gone.sqlite"]
    assert "gone.sqlite: all of it is paid for again" in CliRunner().invoke(app, told).output
    assert StageFolder(tmp_path, "select_sources").done()
    assert CliRunner().invoke(app, [*command, "--yes"]).exit_code == 0
    assert not StageFolder(tmp_path, "select_sources").done()


# -- a damaged disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lines", "byte", "torn", "gone"])
def test_a_changed_shard_is_noticed_named_and_made_again(
    tmp_path,
    teacher,
    metricx,
    undisturbed,
    fault,
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx)
    run(cfg)
    folder = StageFolder(tmp_path, "prefilter_score")
    path = folder.shard(1)
    whole = path.read_bytes()
    if fault == "lines":
        lines = list(read_records(path))[:2]
        with ShardWriter(path) as shard:
            for line in lines:
                shard.write(line)
            shard.commit()
    elif fault == "byte":
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif fault == "torn":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.unlink()
    with pytest.raises(UserError, match="--stage prefilter_score --repair 1"):
        run(cfg, resume=True)
    with pytest.raises(UserError, match="--stage prefilter_score --repair 1"):
        run(cfg, stages=STAGES[1:], overwrite=True)
    assert sum("--repair 1" in line for line in repair(cfg)) == 1
    asked = len(teacher.requests)
    run_stages(cfg, RunOptions(("prefilter_score",), resume=True, repair=1))
    assert len(teacher.requests) == asked and path.read_bytes() == whole
    run(cfg, resume=True)
    run(cfg, stages=STAGES[1:], overwrite=True)
    assert output(tmp_path) == output(undisturbed)


def test_what_an_upstream_refused_is_no_answer_to_keep():
    refused = SampleError("upstream", "a refused key", retryable=False).wire()
    assert module._may_come({"ok": False, "error": refused})
    confused = SampleError("model_failure", "no verdict").wire()
    assert not module._may_come({"ok": False, "error": confused})


def test_nobody_is_asked_any_more_when_an_answer_could_not_be_kept(
    tmp_path,
    teacher,
    metricx,
    monkeypatch,
):
    texts = [f"Sentence number {i} is to be translated." for i in range(60)]
    write_sources(tmp_path, texts, per_shard=60)
    cfg = config(tmp_path, teacher, metricx)

    async def full(self, answers):
        raise UserError("database or disk is full")

    monkeypatch.setattr(SqliteAnswers, "put", full)
    teacher.forget()

    def the_oldest_record_waits_for_all_others(body):
        oldest = body["messages"][-1]["content"].endswith(texts[0])
        return oldest and len(teacher.requests) < len(texts)

    teacher.hang = the_oldest_record_waits_for_all_others
    with pytest.raises(UserError, match="disk is full"):
        run_stages(cfg, RunOptions((NAMES[0],)))
    assert len(teacher.requests) < len(texts)


@pytest.mark.parametrize("fault", [{"refuse_n": True}, {"most_choices": 1}])
def test_a_candidate_that_came_is_kept_whatever_becomes_of_its_neighbours(
    fault,
    tmp_path,
    teacher,
    metricx,
    undisturbed,
    monkeypatch,
):
    monkeypatch.setattr("synth.drive.clients.FAILURES_IN_A_ROW", 1000)
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
    for name, value in fault.items():
        setattr(teacher, name, value)
    teacher.finish_reason = broken_off
    with pytest.raises(Unfinished):
        run_stages(cfg, RunOptions((NAMES[2],)))
    assert answered.total()
    sick = False
    run_stages(cfg, RunOptions(tuple(NAMES[2:]), resume=True))
    assert set(answered.values()) == {1}
    assert output(tmp_path) == output(undisturbed)
