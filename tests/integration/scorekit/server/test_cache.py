"""Test the cache with a file, or with a tier that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import os
import sqlite3

import httpx
import pytest
import structlog
from pydantic import SecretStr

from scorekit.server import cache as cache_module
from scorekit.server.cache import Cache, CacheEnvelope, SQLiteTier
from scorekit.server.fake import FakeBackend
from scorekit.server.metrics import Metrics
from scorekit.server.score_endpoint import read_value
from scorekit.server.settings import Secrets
from testing.redis_process import running_redis
from testing.servers import running_service, wait_until

SAMPLES = [{"src": f"s{i}", "mt": f"번역 {i}"} for i in range(40)]


def _scores(url: str) -> tuple[list[float], int]:
    results = httpx.post(f"{url}/v1/score", json={"samples": SAMPLES}).json()["results"]
    return [r["score"] for r in results], sum(r["cached"] for r in results)


def _fresh_service_scores(cache: str) -> tuple[list[float], int]:
    with running_service(FakeBackend(), cache=cache) as url:
        return _scores(url)


def _key(i: int) -> bytes:
    return f"{i:016}".encode()


def _value(i: float) -> bytes:
    return f'{{"score":{float(i)},"tokens":3}}'.encode()


class DictTier:
    """A tier in memory. While `hold` is set, its calls wait; with `error`, they raise."""

    timeout_s = 30.0

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.gets = self.sets = 0
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None

    async def _answer(self) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error

    async def get(self, keys):
        self.gets += 1
        await self._answer()
        return [self.stored.get(key) for key in keys]

    async def set(self, values):
        self.sets += 1
        await self._answer()
        self.stored.update(values)

    async def close(self) -> None: ...


def _cache(tier, metrics=None, *, items=0, secret=None) -> Cache:
    return Cache(items, tier, metrics or Metrics(), SecretStr(secret) if secret else None)


def _counted(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"scorekit_cache_{name}")


async def _until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_score_survives_the_service_that_made_it(kind, tmp_path):
    with running_redis() as redis:
        cache = redis.url if kind == "redis" else f"sqlite:///{tmp_path}/scores.sqlite"
        first, hits = _fresh_service_scores(cache)
        repeated, hits_again = _fresh_service_scores(cache)
    assert repeated == first
    assert (hits, hits_again) == (0, len(SAMPLES))


def test_the_memory_cache_ends_with_its_process():
    assert _fresh_service_scores("memory")[1] == _fresh_service_scores("memory")[1] == 0


def test_memory_keeps_what_was_used_last():
    cache = _cache(None, items=3)
    cache.put_memory({_key(i): _value(i) for i in range(3)})
    assert cache.get_memory([_key(0), _key(9)]) == {_key(0): _value(0)}
    cache.put_memory({_key(3): _value(3)})
    assert set(cache.get_memory([_key(i) for i in range(4)])) == {_key(0), _key(2), _key(3)}


def test_memory_is_bounded_in_bytes_too():
    cache = _cache(None, items=100)
    long = b'{"score":1.0,"error_spans":"' + b"x" * 10 * cache_module.ITEM_BYTES + b'"}'
    for i in range(100):
        cache.put_memory({_key(i): long})
        cache.put_memory({_key(i): long})  # replaced, not counted twice
    assert len(cache.get_memory([_key(i) for i in range(100)])) == 9
    cache.put_memory({_key(i): _value(i) for i in range(100, 200)})
    assert len(cache.get_memory([_key(i) for i in range(200)])) == 100


def test_memory_has_what_the_tier_gave():
    async def run():
        tier = DictTier()
        cache = _cache(tier, items=10)
        await cache.store({_key(1): _value(1)})
        assert cache.get_memory([_key(1)]) == {}
        assert await cache.fetch([_key(1), _key(2)]) == {_key(1): _value(1)}
        assert cache.get_memory([_key(1), _key(2)]) == {_key(1): _value(1)}

    asyncio.run(run())


def test_a_long_list_of_keys_goes_in_parts():
    async def run():
        tier = DictTier()
        cache = _cache(tier)
        values = {_key(i): _value(i) for i in range(2 * cache_module.CHUNK + 1)}
        await cache.store(values)
        assert await cache.fetch(list(values)) == values
        assert (tier.sets, tier.gets) == (3, 3)

    asyncio.run(run())


@pytest.mark.parametrize("secret", [None, "s3cret"])
def test_a_damaged_value_is_a_miss(tmp_path, secret):
    """Check a reply to another call, a flipped digit, and a failed result: none becomes a score."""
    key, other, good = b"k" * 16, b"l" * 16, b'{"score":3.25,"tokens":3}'
    no_results = (
        b"{}",
        b'{"score":null}',
        b'{"score":"0"}',
        b'{"score":true}',
        b"[1.0]",
        b"1.0",
        b"",
        b"{",
        b'{"score":NaN}',
        b'{"score":Infinity}',
        b'{"score":1e999}',
        b'{"score":' + b"9" * 400 + b"}",
        b'{"score":1.0,"id":"x"}',
        b'{"score":1.0,"ok":true}',
        b'{"score":1.0,"cached":true}',
        b'{"score":1.0,"i\\u0064":"x"}',
        b'{"score":1.0\n}',
        b' {"score":1.0}',
        b'{"score":1.0}\n',
        b'{"score":1.0,"a":NaN}',
        b'{"score":1.0,"a":"\xff"}',
        b'{"score":1.0}{}',
    )

    def fits(key, value):
        return read_value(value) is not None

    async def run():
        tier = SQLiteTier(tmp_path / "c.sqlite", 2**20)
        metrics = Metrics()
        cache = _cache(tier, metrics, secret=secret)
        await cache.store({key: good})
        assert await cache.fetch([key], fits) == {key: good}
        (stored,) = await tier.get([key])
        seal = CacheEnvelope(SecretStr(secret) if secret else None)
        damaged = [
            stored.replace(b"3.25", b"7.25"),
            stored[:-2],
            stored[:20],
            key,
            b"",
            seal.close(other, good),
            seal.close(other, good).replace(other, key),
            *(seal.close(key, value) for value in no_results),
        ]
        for value in damaged:
            await tier.set({key: value})
            assert await cache.fetch([key], fits) == {}, value
        await cache.close()
        return _counted(metrics, "damaged_total"), len(damaged)

    counted, expected = asyncio.run(run())
    assert counted == expected


@pytest.mark.parametrize(("writer", "reader"), [(None, "a"), ("a", None), ("a", "b")])
def test_only_who_knows_the_secret_can_store_a_score(writer, reader):
    async def run():
        tier, metrics = DictTier(), Metrics()
        await _cache(tier, secret=writer).store({_key(1): _value(1)})
        assert await _cache(tier, secret=writer).fetch([_key(1)]) == {_key(1): _value(1)}
        assert await _cache(tier, metrics, secret=reader).fetch([_key(1)]) == {}
        assert _counted(metrics, "damaged_total") == 1

    asyncio.run(run())


def test_a_service_believes_only_scores_that_its_secret_signed(tmp_path):
    cache, hits = f"sqlite:///{tmp_path}/c.sqlite", []
    for secret in ("a", "a", "b", "b", None):
        secrets = Secrets(cache_secret=SecretStr(secret) if secret else None)
        with running_service(FakeBackend(), secrets, cache=cache) as url:
            hits.append(_scores(url)[1])
    assert hits == [0, len(SAMPLES), 0, len(SAMPLES), 0]


def test_calls_that_wait_when_the_breaker_opens_return_at_once(monkeypatch):
    """Check that they return: their own timeouts of 30 s would block the test."""
    monkeypatch.setattr(cache_module, "FETCH_S", 30.0)

    async def run():
        tier, metrics = DictTier(), Metrics()
        cache = _cache(tier, metrics)
        tier.hold = asyncio.Event()
        waiting = [asyncio.create_task(cache.fetch([_key(i)])) for i in range(40)]
        await _until(lambda: tier.gets == cache_module.READERS)
        tier.hold, tier.error = None, ConnectionError()
        waiting[0].cancel()  # its turn passes to one that fails
        async with asyncio.timeout(10):
            assert await asyncio.gather(*waiting[1:]) == [{}] * 39
        assert cache.breaker.state == "open"
        assert _counted(metrics, "errors_total") == 1
        assert _counted(metrics, "breaker_open") == 1

    asyncio.run(run())


def test_nobody_waits_long_for_a_turn_at_a_slow_tier(monkeypatch):
    monkeypatch.setattr(cache_module, "FETCH_S", 0.05)

    async def run():
        tier = DictTier()
        cache = _cache(tier)
        tier.hold = asyncio.Event()
        crowd = [cache.fetch([_key(i)]) for i in range(3 * cache_module.READERS)]
        async with asyncio.timeout(10):
            assert await asyncio.gather(*crowd) == [{}] * len(crowd)
        assert cache.breaker.state == "closed"

    asyncio.run(run())


def test_one_probe_at_a_time_tries_a_tier_that_failed(monkeypatch):
    monkeypatch.setattr(cache_module, "REST_S", 0.0)

    async def run():
        tier, metrics = DictTier(), Metrics()
        cache = _cache(tier, metrics, items=1)
        await cache.store({_key(1): _value(1)})
        tier.error = ConnectionError()
        assert await cache.fetch([_key(1)]) == {}
        # The probe fails, and the breaker is open again.
        assert await cache.fetch([_key(1)]) == {}
        assert cache.breaker.state == "half_open"
        await _until(lambda: cache.breaker.state == "open")
        # The next probe is held: no call waits for it, and no other call tries.
        tier.hold, tier.error, tier.gets = asyncio.Event(), None, 0
        for _ in range(5):
            assert await cache.fetch([_key(1)]) == {}
            await asyncio.sleep(0)
            assert (cache.breaker.state, tier.gets) == ("half_open", 1)
        await cache.store({_key(2): _value(2)})
        assert tier.sets == 1
        tier.hold.set()
        await _until(lambda: cache.breaker.state == "closed")
        assert _counted(metrics, "breaker_open") == 0
        assert cache.get_memory([_key(1)]) == await cache.fetch([_key(1)]) == {_key(1): _value(1)}

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())
    assert [line["event"] for line in logs] == ["cache_unavailable", "cache_available"]


def test_a_rest_is_kept():
    async def run():
        tier = DictTier()
        cache = _cache(tier)
        tier.error = ConnectionError()
        for _ in range(5):
            assert await cache.fetch([_key(1)]) == {}
            await asyncio.sleep(0)
        assert tier.gets == 1

    asyncio.run(run())


def test_a_slow_tier_cannot_pile_up_writes(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_PENDING_BYTES", 10_000)

    async def run():
        tier, metrics = DictTier(), Metrics()
        cache = _cache(tier, metrics)
        tier.hold = asyncio.Event()
        writes = [asyncio.create_task(cache.store({_key(i): _value(i)})) for i in range(1000)]
        await _until(lambda: tier.sets == cache_module.WRITERS)
        num_pending = sum(not write.done() for write in writes)
        assert 10 < num_pending < 100
        assert _counted(metrics, "errors_total") == 1000 - num_pending
        tier.hold.set()
        await asyncio.gather(*writes)
        assert len(tier.stored) == num_pending
        await cache.store({_key(5000): _value(1)})
        assert _key(5000) in tier.stored

    asyncio.run(run())


def test_a_refused_write_leaves_the_reads_alone():
    async def run():
        tier, metrics = DictTier(), Metrics()
        cache = _cache(tier, metrics)
        await cache.store({_key(1): _value(1)})
        tier.error = OSError("full")
        await cache.store({_key(2): _value(2)})
        await cache.store({_key(3): _value(3)})
        tier.error = None
        assert await cache.fetch([_key(1), _key(2)]) == {_key(1): _value(1)}
        assert _counted(metrics, "errors_total") == 2

    with structlog.testing.capture_logs() as logs:
        asyncio.run(run())
    assert [line["event"] for line in logs] == ["cache_not_stored"]


def test_a_locked_file_is_read_and_not_written(tmp_path):
    path = tmp_path / "c.sqlite"

    async def run():
        cache = _cache(SQLiteTier(path, 2**20), metrics := Metrics())
        await cache.store({_key(1): _value(1)})
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await cache.store({_key(2): _value(2)})
        assert _counted(metrics, "errors_total") == 1
        assert await cache.fetch([_key(1), _key(2)]) == {_key(1): _value(1)}
        other.execute("ROLLBACK")
        await cache.store({_key(2): _value(2)})
        assert await cache.fetch([_key(2)]) == {_key(2): _value(2)}
        await cache.close()

    asyncio.run(run())


def test_a_full_disk_is_read_and_not_written(tmp_path):
    """Use SQLite's limit of pages, which gives the error of a full disk."""

    async def run():
        tier = SQLiteTier(tmp_path / "c.sqlite", 2**30)
        cache = _cache(tier, metrics := Metrics())
        await cache.store({_key(1): _value(1)})
        tier._write_file.open().execute("PRAGMA max_page_count = 16")
        await cache.store({_key(i): _value(i) for i in range(2, 5000)})
        assert _counted(metrics, "errors_total") == 1
        assert await cache.fetch([_key(1)]) == {_key(1): _value(1)}
        await cache.close()

    asyncio.run(run())


def test_answers_stay_right_when_the_file_is_damaged_under_the_service(tmp_path):
    path = tmp_path / "c.sqlite"
    with running_service(FakeBackend(), cache=f"sqlite:///{path}", cache_memory_items=0) as url:
        right, _ = _scores(url)
        wait_until(lambda: _scores(url) == (right, len(SAMPLES)))
        for file in tmp_path.iterdir():
            with file.open("r+b") as damaged:
                damaged.write(os.urandom(file.stat().st_size))
        for _ in range(3):
            assert _scores(url)[0] == right
