"""Check that a paid answer is never paid again: after kill -9, in other runs, in damaged files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from scorekit.errors import UserError
from scorekit.paid.account import ApiUsage, BudgetExceeded
from scorekit.paid.answers import paid_key
from scorekit.paid.store import open_store
from tests.kits import forked
from tests.kits.trainer.search_answers import PICTURES, answering, episode, serving
from trainer.search.answer.config import SEARCH

COUNT = 40


@pytest.fixture(scope="module")
def served():
    with serving() as (fake, config):
        yield fake, config


@pytest.fixture
def fake(served):
    served[0].well()
    served[0].forget()
    return served[0]


def asked_for(fake) -> Counter[str]:
    """Return how often the server has answered each question."""
    return Counter(
        request.body["messages"][1]["content"][0]["text"]
        for request in fake.requests
        if request.status == 200
    )


def process(config, folder) -> forked.Popen:
    command = [sys.executable, "-m", "tests.kits.trainer.paying", json.dumps(config)]
    return forked.Popen([*command, str(folder), f"{COUNT}"], stdout=subprocess.PIPE, text=True)


def test_a_run_that_is_killed_pays_for_no_answer_that_it_had(served, fake, tmp_path):
    config = served[1] | {"generator": served[1]["generator"] | {"max_requests": 3}}
    running = process(config, tmp_path)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(10)]
    running.send_signal(signal.SIGKILL)
    lines += running.stdout.read().splitlines(keepends=True)
    running.stdout.close()
    running.wait()
    had = {f"number {line.split()[0]}" for line in lines if line.endswith(" ok\n")}
    last = process(config, tmp_path)
    end, _ = last.communicate()
    assert last.returncode == 0
    served_now = asked_for(fake)
    assert served_now.keys() == {f"number {n}" for n in range(COUNT)}
    assert len(had) >= 10 and all(served_now[question] == 1 for question in had)
    # These calls were in flight or not yet written when the process was killed.
    num_repeated = sum(served_now.values()) - COUNT
    assert num_repeated <= 3
    calls = int(end.split()[-1])  # the ledger covers both processes
    assert COUNT <= calls <= sum(served_now.values())


def finish(served, folder, *episodes, run="run", **sections):
    async def work():
        pipeline = answering(served[1], folder, run=run, **sections)
        try:
            done = [
                await pipeline.finish(trajectory, PICTURES.__getitem__) for trajectory in episodes
            ]
            return done, pipeline.spent
        finally:
            await pipeline.close()

    return asyncio.run(work())


def test_another_run_takes_answers_from_a_file_that_it_shares(served, fake, tmp_path):
    shared = str(tmp_path / "shared.sqlite")
    finish(served, tmp_path / "a", episode("d_1"), run="a", answers=shared)
    (done,), spent = finish(served, tmp_path / "b", episode("d_1"), run="b", answers=shared)
    assert done.answer.charge.cached and done.judged.score == 1.0
    assert spent["generator"].calls == 0 and len(fake.requests) == 1


def test_a_run_has_one_process_and_says_so(served, fake, tmp_path):
    store = open_store(tmp_path / "answers.sqlite", SEARCH, "run")
    try:
        with pytest.raises(UserError, match="another process of the run 'run' has it"):
            finish(served, tmp_path, episode("d_1"))
        finish(served, tmp_path, episode("d_1"), run="other")
    finally:
        asyncio.run(store.close())
    finish(served, tmp_path, episode("d_1"))


def test_the_cap_holds_over_processes_and_what_is_known_costs_nothing(served, fake, tmp_path):
    price = {"generator": {"prompt": 0.0, "completion": 1_000_000.0}, "cap": 7.0}
    sections = {"money": price, "generator": {"max_output_tokens": 4}}
    questions = [episode("d_1", question=f"number {n}", id=f"t{n}") for n in range(5)]
    with pytest.raises(BudgetExceeded, match="is spent"):
        finish(served, tmp_path, *questions, **sections)
    assert len(fake.requests) == 2  # two tokens each: a third call could have used four more
    with pytest.raises(BudgetExceeded):
        finish(served, tmp_path, *questions, **sections)
    assert len(fake.requests) == 2
    raised = sections | {"money": price | {"cap": 100.0}}
    done, spent = finish(served, tmp_path, *questions, **raised)
    assert [trajectory.judged.score for trajectory in done] == [1.0] * 5
    assert len(fake.requests) == 5 and spent["generator"].money == pytest.approx(10.0)


def test_a_damaged_answer_is_none_and_is_told(served, fake, tmp_path):
    finish(served, tmp_path, episode("d_1"))
    with sqlite3.connect(tmp_path / "answers.sqlite") as db:
        db.execute("UPDATE answers SET value = replace(value, 'percent', 'per mil')")
    db.close()
    (done,), _ = finish(served, tmp_path, episode("d_1"))
    assert done.answer.text == "12 percent" and len(fake.requests) == 2


def test_a_file_that_cannot_be_used_is_said_before_anything_is_paid(served, fake, tmp_path):
    (tmp_path / "no.sqlite").write_bytes(b"this is no database" * 100)
    (tmp_path / "folder").mkdir()
    for name in ("no.sqlite", "folder"):
        with pytest.raises(UserError, match=name):
            finish(served, tmp_path, episode("d_1"), answers=str(tmp_path / name))
    assert not fake.requests


def test_a_file_with_damaged_pages_is_said_before_anything_is_paid(served, fake, tmp_path):
    finish(served, tmp_path, episode("d_1"))
    path = tmp_path / "answers.sqlite"
    content = bytearray(path.read_bytes())
    for offset in range(4096, len(content)):  # SQLite itself would report a damaged first page
        content[offset] ^= 0x5A
    path.write_bytes(content)
    fake.forget()
    with pytest.raises(UserError, match=r"damaged\. Free disk space, or name another"):
        finish(served, tmp_path, episode("d_1"))
    assert not fake.requests


def test_a_file_that_is_deleted_under_a_run_ends_it(served, fake, tmp_path):
    async def work():
        pipeline = answering(served[1], tmp_path)
        try:
            await pipeline.finish(episode("d_1"), PICTURES.__getitem__)
            os.unlink(tmp_path / "answers.sqlite")
            await pipeline.finish(episode("d_2"), PICTURES.__getitem__)
        finally:
            await pipeline.close()

    with pytest.raises(UserError, match="deleted or replaced"):
        asyncio.run(work())


def test_keys_tell_all_apart_that_an_answer_depends_on():
    contents = [["q", ["a", "b"], 1], ["q", ["b", "a"], 1], ["q", ["a"], 1], ["q", ["ab"], 1]]
    keys = {paid_key("generator", content) for content in contents}
    assert len(keys | {paid_key("judge", contents[0])}) == 5
    assert paid_key("generator", contents[0]) == paid_key("generator", ["q", ["a", "b"], 1])


def test_charges_are_summed_by_run(tmp_path):
    async def work():
        for run, calls in (("a", 2), ("b", 1)):
            for number in range(calls):
                store = open_store(tmp_path / "x.sqlite", SEARCH, run)
                charge = ApiUsage(calls=1, prompt_tokens=10, completion_tokens=1)
                spent = await store.finish(
                    paid_key(run, number), "generator", charge, {"text": "x"}
                )
                await store.close()
            assert spent == {
                "generator": ApiUsage(
                    calls=calls, prompt_tokens=10 * calls, completion_tokens=calls
                )
            }

    asyncio.run(work())
