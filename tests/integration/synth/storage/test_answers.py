"""Check that nothing is paid for twice, and that damage is detected."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.locks import hold_locks
from scorekit.paid.repair import repair_database
from scorekit.paid.store import open_store
from synth.__main__ import app
from synth.config import ANSWERS, REDIS_PASSWORD, RunConfig
from synth.storage.store import digest_of
from testing.redis_process import running_redis
from tests.kits import forked

KEYS = [bytes.fromhex(digest_of(i)) for i in range(3000)]


def open_answers(location):
    return open_store(location, ANSWERS)


def answer(i):
    return {"text": f"번역 {i} " * 20, "finish_reason": "stop"}


def fill(path, numbers=range(3000), at_once=50):
    async def work():
        answers = open_answers(path)
        for start in range(0, len(numbers), at_once):
            await answers.put({KEYS[i]: answer(i) for i in numbers[start : start + at_once]})
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
    "from tests.integration.synth.storage.test_answers import KEYS, answer, open_answers\n"
    "async def work():\n"
    "    answers = open_answers(pathlib.Path(sys.argv[1]))\n"
    "    for i in range(50): await answers.put({KEYS[i]: answer(i)})\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "asyncio.run(work())"
)


def test_an_answer_outlives_a_process_that_is_killed(tmp_path):
    path = tmp_path / "answers.sqlite"
    assert forked.run([sys.executable, "-c", KILLED, path]).returncode == -9
    assert read(path) == ({KEYS[i]: answer(i) for i in range(50)}, 0)


def test_null_is_an_answer_too_and_a_new_one_takes_the_place_of_the_old(tmp_path):
    async def work():
        answers = open_answers(tmp_path / "answers.sqlite")
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
    answers, damaged = read(path)
    assert damaged == 1 and answers == {KEYS[i]: answer(i) for i in range(3000) if i != 6}


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "header":
        content[:100] = b"\xff" * 100
    elif kind == "a page":
        content[len(content) // 2 : len(content) // 2 + 4096] = b"\xff" * 4096
    elif kind == "the last page":
        content[-4096:] = b"\xff" * 4096
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind, kept_at_least",
    [("header", 3000), ("a page", 2800), ("the last page", 2800), ("the second half", 1000)],
)
def test_all_that_can_be_read_of_a_damaged_file_is_kept(tmp_path, kind, kept_at_least):
    path = tmp_path / "answers.sqlite"
    fill(path)
    damage(path, kind)
    num_kept, _ = repair_database(path)
    assert num_kept >= kept_at_least
    answers, damaged = read(path)
    assert len(answers) == num_kept and not damaged
    assert all(answers[KEYS[i]] == answer(i) for i in range(3000) if KEYS[i] in answers)
    assert path.with_name("answers.sqlite.damaged").exists()
    assert repair_database(path) == (num_kept, None)  # the file is intact now


def test_a_flip_of_any_bit_costs_the_answers_of_one_page_at_most(tmp_path):
    path = tmp_path / "answers.sqlite"
    long = {"text": "긴 번역 " * 2000, "finish_reason": "stop"}  # in overflow pages

    async def work():
        answers = open_answers(path)
        await answers.put({KEYS[i]: long if i % 40 == 0 else answer(i) for i in range(400)})
        await answers.close()

    asyncio.run(work())
    original = path.read_bytes()
    rng = random.Random(7)
    for offset in (*range(0, 100, 10), *(rng.randrange(len(original)) for _ in range(60))):
        content = bytearray(original)
        content[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        num_kept, _ = repair_database(path)
        assert num_kept >= 390, offset  # a page holds up to nine
        stored, _ = read(path, KEYS[:400])
        assert all(stored[k] in (long, answer(i)) for i, k in enumerate(KEYS[:400]) if k in stored)


def test_what_a_killed_process_left_in_the_log_is_kept_though_the_log_is_damaged(tmp_path):
    path = tmp_path / "answers.sqlite"
    assert forked.run([sys.executable, "-c", KILLED, path]).returncode == -9
    log = path.with_name("answers.sqlite-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1  # SQLite reads nothing after it
    log.write_bytes(content)
    num_kept, _ = repair_database(path)
    assert num_kept >= 49
    answers, damaged = read(path)
    assert len(answers) == num_kept and not damaged


def test_a_file_in_use_is_not_mended_and_one_that_is_mended_not_used(tmp_path):
    path = tmp_path / "answers.sqlite"
    fill(path, range(3))
    answers = open_answers(path)
    with pytest.raises(UserError, match="is working there"):
        repair_database(path)
    asyncio.run(answers.close())
    with hold_locks([(path.with_name("answers.sqlite.lock"), False)], "mend it"):
        with pytest.raises(UserError, match="is being repaired"):
            open_answers(path)
    assert (
        repair_database(path) == (3, None) and not path.with_name("answers.sqlite.damaged").exists()
    )


def test_a_file_that_is_deleted_under_a_run_is_noticed(tmp_path):
    path = tmp_path / "answers.sqlite"

    async def work():
        answers = open_answers(path)
        await answers.put({KEYS[0]: 1})
        path.unlink()
        await answers.put({KEYS[1]: 1})

    with pytest.raises(UserError, match="was deleted or replaced"):
        asyncio.run(work())


def test_a_full_disk_is_said_and_loses_nothing_that_was_kept(tmp_path):
    path = tmp_path / "answers.sqlite"
    code = (
        "import asyncio, pathlib, resource, sys\n"
        "from tests.integration.synth.storage.test_answers import KEYS, answer, open_answers\n"
        "async def work():\n"
        "    answers = open_answers(pathlib.Path(sys.argv[1]))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "    for i in range(3000):\n"
        "        await answers.put({KEYS[i]: answer(i)})\n"
        "        print(i, flush=True)\n"
        "asyncio.run(work())"
    )
    result = forked.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "UserError: run.answers" in result.stderr and "Free disk space" in result.stderr
    num_kept = len(result.stdout.split())
    answers, damaged = read(path)
    assert num_kept > 10 and not damaged
    assert {KEYS[i]: answer(i) for i in range(num_kept)}.items() <= answers.items()


def test_what_is_no_sqlite_file_is_said_in_one_line(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"not a database, but long enough to be one" * 100)
    with pytest.raises(UserError, match="file is not a database"):
        open_answers(path)


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "answers.sqlite"
    code = (
        "import sys, pathlib\n"
        "from tests.integration.synth.storage.test_answers import fill\n"
        "fill(pathlib.Path(sys.argv[1]), range(int(sys.argv[2]), 300, 3), at_once=1)"
    )
    work = [forked.Popen([sys.executable, "-c", code, path, str(i)]) for i in range(3)]
    assert [process.wait() for process in work] == [0, 0, 0]
    assert len(read(path)[0]) == 300


@pytest.mark.parametrize(
    "url", ["redis://user:geheim@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password=geheim"]
)
def test_no_password_is_taken_from_a_url_nor_kept_anywhere(tmp_path, url):
    path = tmp_path / "c.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"out_dir": str(tmp_path / "run"), "answers": url},
                "data": {"src_lang": "eng", "tgt_lang": "kor"},
            }
        )
    )
    result = CliRunner().invoke(app, ["run", "--config", str(path), "--stage", "all"])
    assert result.exit_code == 2 and REDIS_PASSWORD in result.output
    assert "geheim" not in result.output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "location", ["http://127.0.0.1/x", "redis://127.0.0.1:port/0", "postgres://h"]
)
def test_what_is_no_place_of_answers_is_said_in_one_line(location):
    with pytest.raises(ValueError, match="give a path, redis://"):
        RunConfig(out_dir=Path("run"), answers=location)


def test_machines_share_a_redis(monkeypatch):
    monkeypatch.setenv(REDIS_PASSWORD, "geheim")

    async def work(url):
        first, second = open_answers(url), open_answers(url)
        await first.put({KEYS[0]: answer(0), KEYS[1]: answer(1)})
        raw = await second._db.get(b"synth:" + KEYS[1])
        await second._db.set(b"synth:" + KEYS[1], raw[:-1] + b"?")
        cached = await second.get(KEYS[:3])
        for store in (first, second):
            await store.close()
        return cached, second.damaged

    with running_redis("--requirepass", "geheim") as redis:
        assert asyncio.run(work(redis.url)) == ({KEYS[0]: answer(0)}, 1)


def test_a_redis_that_may_evict_is_refused_and_one_that_is_away_said():
    with running_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as redis:
        with pytest.raises(UserError, match="maxmemory-policy allkeys-lru"):
            open_answers(redis.url)
    with pytest.raises(UserError, match="Start it"):
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
        cached = await answers.get(KEYS[1:2])
        await answers.close()
        return cached

    with running_redis() as redis:
        assert asyncio.run(work(redis)) == {KEYS[1]: 2}
