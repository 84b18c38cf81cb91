"""Check that files of the version before are converted, taken over and repaired, each once.

`tests/data/paid` has files that the version before has written: of a run `run` that was killed with
two further processes, and of two commands.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.locks import try_lock
from scorekit.paid import old_files
from scorekit.paid.account import ApiUsage
from scorekit.paid.answers import paid_key
from scorekit.paid.repair import repair_database
from scorekit.paid.store import judge_of, open_store, spent_in
from synth.config import ANSWERS
from synth.storage.store import digest_of
from testing.redis_process import running_redis
from trainer.search.answer.config import SEARCH

DATA = Path(__file__).parents[3] / "data/paid"
RANKS = [f"{kind} {rank}" for rank in (1, 2) for kind in ("rank", "of rank")]


@pytest.fixture
def main(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "search", tmp_path, dirs_exist_ok=True)
    return tmp_path / "answers.sqlite"


def opened(path: Path, run: str, *names: str) -> tuple[list[Any], dict[str, ApiUsage]]:
    """Open a store; return the texts of answers, and what the run has spent."""

    async def work() -> tuple[list[Any], dict[str, ApiUsage]]:
        store = open_store(path, SEARCH, run)
        keys = [paid_key("generator", name) for name in names]
        answers = await store.get(keys)
        await store.close()
        return [answers[key]["text"] for key in keys], store.spent

    return asyncio.run(work())


def usage(calls: int) -> dict[str, ApiUsage]:
    return {
        "generator": ApiUsage(calls=calls, prompt_tokens=10 * calls, completion_tokens=2 * calls)
    }


def test_a_search_file_is_converted_and_files_of_ranks_are_taken_over(main: Path) -> None:
    assert spent_in(main, SEARCH) == usage(10)["generator"]
    assert judge_of(main, SEARCH, "run") == "rules@1"
    names = [*"abcdef", *RANKS]
    texts, spent = opened(main, "run", *names)
    assert texts == [f"{name} percent" for name in names] and spent == usage(7)
    assert sorted(path.name for path in main.parent.iterdir()) == [main.name, f"{main.name}.lock"]
    assert opened(main, "run", *names) == (texts, spent)
    assert spent_in(main, SEARCH) == usage(10)["generator"]


def test_charges_by_the_name_of_a_folder_are_those_of_its_path(main: Path) -> None:
    assert opened(main, "alternatives /runs/found")[1] == usage(2)
    assert opened(main, "alternatives /runs/found")[1] == usage(2)
    assert opened(main, "hallucinations /runs/found")[1] == usage(1)
    assert opened(main, "alternatives /another/found")[1] == {}


def test_a_kill_between_taking_over_and_removing_counts_nothing_twice(
    main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = old_files._merge

    def killed(db: sqlite3.Connection, file: Path) -> None:
        merge(db, file)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(old_files, "_merge", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(main, "run")
    assert spent_in(main, SEARCH) == usage(10)["generator"]
    assert opened(main, "run")[1] == usage(7)


def test_an_answer_that_was_paid_for_again_replaces_a_damaged_one(main: Path) -> None:
    rank_file = next(main.parent.glob("*-rank1.sqlite"))
    with closing(sqlite3.connect(rank_file, isolation_level=None)) as db:
        (key,), (value,) = (
            [paid_key("generator", "a")],
            db.execute("SELECT value FROM answers").fetchone(),
        )
        db.execute("INSERT INTO answers VALUES (?, ?)", (key, value))
    opened(main, "run")
    with closing(sqlite3.connect(main)) as db:
        assert db.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone() == (value,)


@pytest.mark.parametrize("name", ["answers.sqlite", "answers-acba25512100-00000000-rank1.sqlite"])
def test_a_file_that_an_earlier_version_uses_is_refused(main: Path, name: str) -> None:
    lock = try_lock(main.with_name(f"{name}.acba25512100.lock"))
    assert lock is not None
    with lock, pytest.raises(UserError, match="a process of an earlier version has it open"):
        opened(main, "another" if name == main.name else "run")
    assert opened(main, "run")[1] == usage(7)


@pytest.mark.parametrize("name", ["answers.sqlite", "answers-acba25512100-00000000-rank1.sqlite"])
def test_a_damaged_file_is_said_in_one_line(main: Path, name: str) -> None:
    file = main.with_name(name)
    content = bytearray(file.read_bytes())
    content[4096:] = bytes(byte ^ 0x5A for byte in content[4096:])
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"answers\.sqlite: .*damaged\. Free disk space"):
        opened(main, "run")
    assert file.exists()


def test_a_search_file_without_a_header_is_repaired(main: Path) -> None:
    content = bytearray(main.read_bytes())
    content[:100] = b"\xff" * 100
    main.write_bytes(content)
    assert repair_database(main)[0] == 6
    texts, spent = opened(main, "run", *"abc")
    assert texts == ["a percent", "b percent", "c percent"] and spent == usage(7)
    assert judge_of(main, SEARCH, "run") == "rules@1"
    assert opened(main, "alternatives /runs/found")[1] == usage(2)


def test_a_file_and_a_redis_of_the_synthesis_are_read(tmp_path: Path) -> None:
    shutil.copy(DATA / "synth/answers.sqlite", tmp_path)
    values = json.loads((DATA / "synth/redis.json").read_text())

    async def read(location: str, *names: object) -> list[Any]:
        store = open_store(location, ANSWERS)
        keys = [bytes.fromhex(digest_of(name)) for name in names]
        answers = await store.get(keys)
        await store.close()
        return [answers[key] for key in keys]

    texts = [{"text": f"번역 {n}", "finish_reason": "stop"} for n in range(3)]
    path = tmp_path / "answers.sqlite"
    answers = asyncio.run(read(str(path), 0, 1, 2, "null", "score"))
    assert answers == [*texts, None, {"score": 1e-07}]
    with running_redis() as redis:
        import redis as client

        with client.Redis.from_url(redis.url) as db:
            for key, value in values.items():
                db.set(bytes.fromhex(key), bytes.fromhex(value))
        assert asyncio.run(read(redis.url, 0, 1, 2)) == texts
