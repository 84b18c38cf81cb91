"""Check how the files of a run's further processes get into the main file, each of them once."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from trainer.search.answer import rank_files
from trainer.search.answer.answer_cache import PaidAnswerCache, judge_of, paid_key, spent_in
from trainer.search.answer.rank_files import (
    copy_answers,
    known_file,
    opened_copy,
    rank_file,
    take_over_left,
)
from trainer.search.records import ApiUsage

CHARGE = ApiUsage(calls=1, prompt_tokens=10, completion_tokens=1)


def key_of(question: object) -> bytes:
    return paid_key("generator", question)


def write(path: Path, *questions: object, run: str = "run", text: str = "12") -> Path:
    """Write a file as a process does that is then killed."""

    async def work() -> None:
        with closing(PaidAnswerCache(path, run)) as cache:
            for question in questions:
                await cache.put(key_of(question), {"text": text}, "generator", CHARGE)
            await cache.first_judge("rules@1")

    asyncio.run(work())
    return path


def read(path: Path, *questions: object) -> list[Any]:
    """Return the texts of answers."""

    async def work() -> list[Any]:
        with closing(PaidAnswerCache(path, "reader")) as cache:
            answers = [await cache.get(key_of(question)) for question in questions]
        return [answer and answer["text"] for answer in answers]

    return asyncio.run(work())


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("answers-*"))


def test_left_files_are_taken_over_with_answers_charges_and_judge(tmp_path: Path) -> None:
    main = write(tmp_path / "answers.sqlite", "a")
    for rank in (1, 2):
        write(rank_file(main, "run", "0" * 8, rank), rank)
    write(rank_file(main, "old run", "1" * 8, 1), "b", run="old run")
    write(tmp_path / "answers-other.sqlite", "c")
    assert spent_in(main).calls == 4 and judge_of(main, "old run") is None
    take_over_left(main, "run")
    assert left(tmp_path) == ["answers-other.sqlite", left(tmp_path)[-1]]  # and its lock
    assert read(main, "a", 1, 2, "b", "c") == ["12"] * 4 + [None]
    assert spent_in(main) == ApiUsage(calls=4, prompt_tokens=40, completion_tokens=4)
    assert judge_of(main, "old run") == "rules@1"
    with closing(PaidAnswerCache(main, "run")) as cache:
        assert cache.spent()["generator"].calls == 3


def test_a_process_that_is_killed_before_the_removal_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = write(tmp_path / "answers.sqlite", "a")
    write(rank_file(main, "run", "0" * 8, 1), 1)

    def killed(file: Path, run: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rank_files, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            take_over_left(main, "run")
    assert spent_in(main).calls == 2
    take_over_left(main, "run")
    assert spent_in(main).calls == 2 and left(tmp_path) == []


def test_an_answer_that_was_paid_for_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    main = write(tmp_path / "answers.sqlite", "a", "b")
    with closing(sqlite3.connect(main, isolation_level=None)) as db:
        db.execute("UPDATE answers SET value = x'00' WHERE key = ?", (key_of("a"),))
    write(rank_file(main, "run", "0" * 8, 1), "a", text="13")
    take_over_left(main, "run")
    assert read(main, "a", "b") == ["13", "12"]


def test_files_of_processes_that_still_run_stay(tmp_path: Path) -> None:
    main = write(tmp_path / "answers.sqlite", "a")
    of_run, other = rank_file(main, "run", "0" * 8, 1), rank_file(main, "other", "1" * 8, 1)
    with closing(PaidAnswerCache(other, "other")):
        take_over_left(main, "run")
        assert other.exists()
    with (
        closing(PaidAnswerCache(of_run, "run")),
        pytest.raises(UserError, match="another process of the run 'run' has it open"),
    ):
        take_over_left(main, "run")
    take_over_left(main, "run")
    assert left(tmp_path) == []


def test_a_damaged_file_is_said_and_one_that_was_just_created_is_empty(tmp_path: Path) -> None:
    main = write(tmp_path / "answers.sqlite", "a")
    file = rank_file(main, "run", "0" * 8, 1)
    file.write_bytes(b"")
    take_over_left(main, "run")
    assert not file.exists()
    write(file.with_name(file.name.replace("rank1", "rank2")), *range(50)).rename(file)
    content = bytearray(file.read_bytes())
    content[4096:] = bytes(byte ^ 0x5A for byte in content[4096:])
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"answers\.sqlite: .*Free disk space, or name another"):
        take_over_left(main, "run")
    assert file.exists() and read(main, "a") == ["12"]


def test_the_copy_has_the_answers_and_goes_with_its_run(tmp_path: Path) -> None:
    main = write(tmp_path / "answers.sqlite", "a", "b")
    for run in ("run", "killed run"):
        with closing(PaidAnswerCache(main, run)) as cache:
            for _ in range(2):  # one is left of a run that was killed
                copy_answers(cache, known_file(main, run))
    with pytest.raises(UserError, match="Name a file in a folder that all machines share"):
        opened_copy(known_file(main, "run of another machine"))
    with closing(opened_copy(known_file(main, "run"))) as db:
        assert db.execute("SELECT count(*) FROM answers").fetchall() == [(2,)]
    take_over_left(main, "run")
    assert left(tmp_path) == []
