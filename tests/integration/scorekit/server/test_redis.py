"""Test a real Redis behind a service: down, hung, full, restarted, protected, slow."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys

import httpx
import pytest
import structlog
from pydantic import SecretStr

from bench.chaos.redis import random_cancellations
from scorekit.errors import UserError
from scorekit.schemas import TranslationSample
from scorekit.server import cache as cache_module
from scorekit.server.cache import Cache, RedisTier, open_tier
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.metrics import Metrics
from scorekit.server.settings import Secrets
from testing.proxy import delaying_proxy
from testing.redis_process import running_redis
from testing.servers import PATIENCE_S, free_port, running_service, wait_ready, wait_until
from tests.kits import forked

PASSWORD = "correct-horse-battery"
WRONG = "wrong-donkey-staple"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Reconnect soon, and abandon no call only because the machine is busy (after 0.1 s by
    default).

    The limit is read when the tier is created."""
    monkeypatch.setattr(cache_module, "REST_S", 0.05)
    monkeypatch.setattr(cache_module, "FETCH_S", PATIENCE_S)
    monkeypatch.setattr(RedisTier, "timeout_s", PATIENCE_S)


def _samples(name: str) -> list[dict[str, str]]:
    return [{"src": f"{name} {i}", "mt": f"번역 {i}"} for i in range(40)]


OLD, NEW = _samples("old"), _samples("new")


def _hits(url: str, samples: list[dict[str, str]]) -> int:
    """Return the number of hits; the test fails unless all of them are right."""
    results = httpx.post(f"{url}/v1/score", json={"samples": samples}).json()["results"]
    assert [r["score"] for r in results] == [_right(sample) for sample in samples]
    return sum(r["cached"] for r in results)


def _right(sample: dict[str, str]) -> float:
    return fake_score(TranslationSample(**sample), 25.0)


def _metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(rf"^scorekit_cache_{name} (\S+)$", text, re.M).group(1))


def _service(cache: str, secrets: Secrets | None = None):
    return running_service(FakeBackend(), secrets, cache=cache, cache_memory_items=0)


def _wait_cached(url: str, samples: list[dict[str, str]]) -> None:
    wait_until(lambda: _hits(url, samples) == len(samples))


@pytest.mark.parametrize("blow", ["kill", "hang"])
def test_answers_stay_right_when_redis_is_gone_and_when_it_is_back(blow, monkeypatch):
    if blow == "hang":
        monkeypatch.setattr(RedisTier, "timeout_s", 0.5)
    with running_redis() as redis, _service(redis.url) as url:
        _wait_cached(url, OLD)
        getattr(redis, blow)()
        wait_until(lambda: _hits(url, OLD) == 0)
        assert _metric(url, "breaker_open") == 1
        for _ in range(3):
            assert _hits(url, OLD) == 0
        redis.wake() if blow == "hang" else redis.start()
        _wait_cached(url, OLD)
        wait_until(lambda: _metric(url, "breaker_open") == 0)
        assert _metric(url, "damaged_total") == 0


def test_answers_stay_right_when_redis_is_full():
    with running_redis() as redis, _service(redis.url) as url:
        _wait_cached(url, OLD)
        _client(redis).config_set("maxmemory", 1)
        for _ in range(3):
            assert _hits(url, NEW) == 0
        wait_until(lambda: _metric(url, "errors_total") == 3)
        assert _hits(url, OLD) == len(OLD)
        assert _metric(url, "breaker_open") == 0
        _client(redis).config_set("maxmemory", 0)
        _wait_cached(url, NEW)


def test_a_restart_between_two_requests_goes_unnoticed():
    with running_redis() as redis, _service(redis.url) as url:
        _wait_cached(url, OLD)
        redis.kill()
        redis.start()
        assert _hits(url, OLD) == 0
        _wait_cached(url, OLD)
        assert _metric(url, "errors_total") == 0


def test_scores_leave_redis_after_a_month_and_not_all_at_once():
    async def run(url):
        cache = Cache(0, open_tier_for(url), Metrics(), None)
        await cache.store({f"{i:016}".encode(): b'{"score":1.0}' for i in range(100)})
        await cache.close()

    with running_redis() as redis:
        asyncio.run(run(redis.url))
        client = _client(redis)
        days = [client.ttl(key) / 86400 for key in client.keys("scorekit:*")]
    assert len(days) == 100
    assert 29.9 < min(days) < max(days) < 33
    assert max(days) - min(days) > 0.5


def test_a_redis_that_will_refuse_when_full_is_told_once():
    with structlog.testing.capture_logs() as logs:
        for flags in (("--maxmemory", "100mb"), ("--maxmemory-policy", "allkeys-lru"), ()):
            with running_redis(*flags) as redis, _service(redis.url) as url:
                _wait_cached(url, OLD)
    warnings = [line for line in logs if line["event"] == "redis_will_refuse_when_full"]
    assert len(warnings) == 1 and warnings[0]["maxmemory"] == 100 * 2**20


def test_a_password_opens_redis():
    secrets = Secrets(redis_password=SecretStr(PASSWORD))
    with running_redis("--requirepass", PASSWORD) as redis, _service(redis.url, secrets) as url:
        _wait_cached(url, OLD)
        assert _metric(url, "errors_total") == 0


@pytest.mark.parametrize("password", [None, WRONG], ids=["none", "wrong"])
def test_without_the_password_a_service_scores_and_says_so_once(password):
    """Check the log of a real process at debug level."""
    environment = {k: v for k, v in os.environ.items() if k != "SCOREKIT_REDIS_PASSWORD"}
    if password:
        environment["SCOREKIT_REDIS_PASSWORD"] = password
    port = free_port()
    with running_redis("--requirepass", PASSWORD) as redis:
        process = forked.Popen(
            [
                sys.executable,
                "-m",
                "scorekit.server.fake",
                "--port",
                str(port),
                "--cache",
                redis.url,
                "--log-level",
                "debug",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(url)
            for _ in range(5):
                assert _hits(url, _samples(f"{random.random()}")) == 0
            assert _metric(url, "breaker_open") == 1
        finally:
            process.terminate()
            output = "".join(process.communicate(timeout=180))
    assert process.returncode == 0
    assert output.count('"warning"') == 1 and '"cache_unavailable"' in output
    assert PASSWORD not in output and WRONG not in output


@pytest.mark.parametrize(
    "url", ["redis://:{}@host:1/0", "rediss://me:{}@host", "redis://host?password={}"]
)
def test_a_password_in_the_address_is_refused_and_not_shown(url):
    with pytest.raises(UserError, match="SCOREKIT_REDIS_PASSWORD") as error_info:
        open_tier(url.format(PASSWORD), name="x", max_bytes=2**20, redis_password=None)
    assert PASSWORD not in str(error_info.value)


def test_a_cancelled_call_never_gives_its_reply_to_another():
    """Cancel hundreds of reads at random moments, while replies are on the way."""
    values = {f"{i:016}".encode(): f'{{"score":{i}.5}}'.encode() for i in range(200)}
    rng = random.Random(7)
    finished = cancelled = 0

    async def read_once(cache: Cache) -> None:
        nonlocal finished, cancelled
        keys = rng.sample(sorted(values), 5)
        call = asyncio.create_task(cache.fetch(keys))
        chance = rng.random()
        if chance < 0.25:  # some time into the call, however long a round trip takes here
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            call.cancel()
        elif chance < 0.5:
            await asyncio.sleep(rng.uniform(0, 0.004))
            call.cancel()
        try:
            values_by_key = await call
        except asyncio.CancelledError:
            cancelled += 1
        else:
            finished += 1
            assert values_by_key == {key: values[key] for key in keys}

    async def run(port: int) -> Metrics:
        metrics = Metrics()
        tier = open_tier_for(f"redis://127.0.0.1:{port}/0")
        cache = Cache(0, tier, metrics, None)
        await cache.store(values)

        async def read_many() -> None:
            for _ in range(400):
                await read_once(cache)

        await asyncio.gather(*(read_many() for _ in range(4)))
        # The remaining connections still answer.
        assert await cache.fetch(list(values)) == values
        await cache.close()
        return metrics

    with (
        running_redis() as redis,
        delaying_proxy(redis.port, lambda: rng.uniform(0, 0.001)) as port,
    ):
        metrics = asyncio.run(run(port))
    # The key in each value would have turned a mix-up into a miss; this did not happen.
    assert metrics.registry.get_sample_value("scorekit_cache_damaged_total") == 0
    assert finished > 300 and cancelled > 100, (finished, cancelled)


def test_clients_and_reads_that_leave_at_random_moments_disturb_nobody():
    counts = asyncio.run(random_cancellations(300))
    assert counts["wrong"] == counts["reads_wrong"] == 0
    assert counts["failed"] == counts["damaged_values"] == counts["reads_damaged_values"] == 0
    assert counts["answered"] > 100 and counts["cancelled"] > 50, counts


def open_tier_for(url: str) -> RedisTier:
    tier = open_tier(url, name="x", max_bytes=2**20, redis_password=None)
    assert isinstance(tier, RedisTier)
    return tier


def _client(redis):
    from redis import Redis

    return Redis(port=redis.port)
