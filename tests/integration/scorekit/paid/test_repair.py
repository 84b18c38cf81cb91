"""Check that a damaged file of a run keeps answers, charges and judges, by `search salvage`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.paid.account import Account, ApiUsage
from scorekit.paid.answers import paid_key
from scorekit.paid.repair import repair_database
from scorekit.paid.store import judge_of, open_store, spent_in
from trainer.search.answer.config import SEARCH
from trainer.search.cli import app

COUNT, CHARGE = 400, ApiUsage(calls=1, prompt_tokens=10, completion_tokens=1)
KEYS = [paid_key("generator", number) for number in range(COUNT)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with answers, charges of two runs, a judge, and a call in flight."""
    path = tmp_path / "answers.sqlite"

    async def work() -> None:
        stores = [open_store(path, SEARCH, run) for run in ("a", "b")]
        for number, key in enumerate(KEYS):
            answer = {"text": f"{number} percent " * 10}
            await stores[number % 2].finish(key, "generator", CHARGE, answer)
        await stores[0].first_judge("rules@1")
        await stores[0].begin(b"0" * 16, "generator", CHARGE, Account(None, {}))
        for store in stores:
            await store.close()

    asyncio.run(work())
    return path


def test_a_page_that_is_destroyed_costs_its_own_rows(file: Path) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"`scorekit search salvage FILE` keeps what can be read"):
        open_store(file, SEARCH, "a")
    result = CliRunner().invoke(app, ["salvage", str(file)])
    assert result.exit_code == 0 and "answers kept; " in result.output
    assert repair_database(file)[1] is None
    calls = spent_in(file, SEARCH).calls
    num_answers = repair_database(file)[0]
    assert COUNT - 150 < calls <= COUNT and COUNT - 30 < num_answers <= COUNT

    async def read() -> None:
        store = open_store(file, SEARCH, "a")
        assert len(await store.get(KEYS)) == num_answers and not store.damaged
        assert not store.unfinished
        await store.close()

    asyncio.run(read())


def test_a_file_without_a_header_keeps_all(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[:100] = b"\xff" * 100
    file.write_bytes(content)
    assert repair_database(file)[0] == COUNT
    assert spent_in(file, SEARCH) == ApiUsage(
        calls=COUNT, prompt_tokens=10 * COUNT, completion_tokens=COUNT
    )
    assert judge_of(file, SEARCH, "a") == "rules@1"


def test_a_file_that_a_run_uses_is_not_repaired(file: Path) -> None:
    async def work() -> None:
        store = open_store(file, SEARCH, "a")
        with pytest.raises(UserError, match="working there, so this process cannot repair it"):
            repair_database(file)
        await store.close()

    asyncio.run(work())
