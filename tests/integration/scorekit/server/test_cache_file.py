"""Test the SQLite file of the second cache tier: its damage and its location."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest
from pydantic_core import to_json

from scorekit.errors import UserError
from scorekit.server.cache import Cache, SQLiteTier, open_tier
from scorekit.server.metrics import Metrics


@pytest.mark.parametrize(
    "damage", ["first bytes", "a page", "half is missing", "nothing but noise"]
)
def test_a_damaged_file_is_moved_aside_and_the_service_starts_anew(tmp_path, damage, capsys):
    path = tmp_path / "c.sqlite"
    values = {b"%016d" % i: b'{"score":%d.0,"tokens":3}' % i for i in range(300)}

    async def store_and_fetch(store):
        tier = open_tier(f"sqlite:///{path}", name="x", max_bytes=2**20, redis_password=None)
        cache = Cache(0, tier, Metrics(), None)
        if store:
            await cache.store(values)
        cached = await cache.fetch(list(values))
        await cache.close()
        return cached

    assert asyncio.run(store_and_fetch(store=True)) == values
    original = path.read_bytes()
    path.write_bytes(
        {
            "first bytes": b"\0" * 100 + original[100:],
            "a page": original[:4096] + os.urandom(len(original) - 4096),
            "half is missing": original[: len(original) // 2],
            "nothing but noise": os.urandom(5000),
        }[damage]
    )
    damaged = path.read_bytes()
    assert asyncio.run(store_and_fetch(store=False)) == {}
    assert asyncio.run(store_and_fetch(store=True)) == values
    (aside,) = tmp_path.glob("c.sqlite.damaged-*")
    assert aside.read_bytes() == damaged
    assert "cache_file_damaged" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_a_file_that_is_harmed_in_mid_run_is_begun_anew_without_a_restart(
    tmp_path, harm, capsys, monkeypatch
):
    monkeypatch.setattr("scorekit.server.cache.REST_S", 0.0)
    path = tmp_path / "c.sqlite"
    # more than SQLite keeps in its log and in memory
    values = {b"%016d" % i: to_json({"score": float(i), "x": "y" * 40_000}) for i in range(400)}

    async def run():
        tier = open_tier(f"sqlite:///{path}", name="x", max_bytes=2**30, redis_password=None)
        tier.timeout_s = 60.0
        cache = Cache(0, tier, Metrics(), None)
        await cache.store(values)
        if harm == "damaged":
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * (size - 4096))
        else:
            path.unlink()
        assert len(await cache.fetch(list(values))) < len(values)
        async with asyncio.timeout(60):
            while cache.breaker.state != "closed":
                await cache.fetch(list(values)[:1])  # its probe succeeds
                await asyncio.sleep(0.01)
        await cache.store(values)
        assert await cache.fetch(list(values)) == values
        await cache.close()

    asyncio.run(run())
    log_text = capsys.readouterr().out
    assert ("cache_file_damaged" in log_text) == (harm == "damaged")
    assert len(list(tmp_path.glob("c.sqlite.damaged-*"))) == (harm == "damaged")
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM scores").fetchone() == (400,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_cache_file_is_never_put_into_a_folder_of_the_root_that_is_not_there(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for target in ("sqlite:///rel.sqlite", "sqlite:///no-such-folder/c.sqlite"):
        with pytest.raises(UserError, match=r"sqlite://(rel|no-such)"):
            open_tier(target, name="x", max_bytes=2**20, redis_password=None)
    tier = open_tier("sqlite://runs/c.sqlite", name="x", max_bytes=2**20, redis_password=None)
    asyncio.run(tier.close())
    assert (tmp_path / "runs/c.sqlite").exists()


def test_the_sqlite_file_stays_under_its_cap(tmp_path):
    async def run():
        tier = SQLiteTier(tmp_path / "c.sqlite", 2**20)
        for i in range(300):
            await tier.set({f"{i:08}{j:08}".encode(): os.urandom(200) for j in range(64)})
        newest = await tier.get([f"{299:08}{5:08}".encode(), f"{0:08}{5:08}".encode()])
        await tier.close()
        return newest

    newest, oldest = asyncio.run(run())
    assert newest is not None and oldest is None
    assert sum(p.stat().st_size for p in Path(tmp_path).iterdir()) < 3 * 2**20


@pytest.mark.parametrize("target", ["disk", "mysql://x", "redis//typo", "redis://host:port"])
def test_an_unknown_cache_is_a_clear_error(target):
    with pytest.raises(UserError, match="--cache"):
        open_tier(target, name="x", max_bytes=2**20, redis_password=None)


def test_a_file_that_is_no_cache_is_a_clear_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, not a database; " * 10)
    with pytest.raises(UserError, match=r"notes.txt: file is not a database"):
        open_tier(f"sqlite:///{path}", name="x", max_bytes=2**20, redis_password=None)
