"""Does Redis ever make a score wrong, or a request fail? Cancellations, and its death under load.

`python -m bench.chaos.redis [REQUESTS]` prints the results as JSON. It starts its own Redis, the
proxy before it and the service (a fake backend: the right score is a function of the texts).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scorekit.command import clean_exit
from scorekit.schemas import TranslationSample
from scorekit.server.cache import Cache, open_tier
from scorekit.server.fake import fake_score
from scorekit.server.metrics import Metrics
from testing.processes import exit_on_sigterm, free_port, running
from testing.proxy import delaying_proxy
from testing.redis_process import RedisProcess, running_redis

CALLERS = 16
LONGEST_DELAY_S = 0.003  # of a reply, by the proxy
READY_S = 60.0


#: httpx's pool counts connections that a cancelled call left half open, until none is to be had.
UNBOUNDED = httpx.Limits(max_connections=None)


async def random_cancellations(requests: int) -> dict[str, Any]:
    """Send `requests` over HTTP and as many reads to the cache, and cancel half of both.

    Clients leave at a random moment. Redis answers late, through a proxy. Half of the samples were
    sent before, so that hits and misses mix. The service keeps nothing in memory, so that each
    request reads Redis.
    """
    rng = random.Random(1)

    def delay() -> float:
        return rng.uniform(0, LONGEST_DELAY_S)

    with running_redis() as redis, delaying_proxy(redis.port, delay) as port:
        address = f"redis://127.0.0.1:{port}/0"
        started = time.monotonic()
        with _running_fake(address) as url:
            over_http = await _leaving_clients(url, requests, rng)
        cancelled_reads = await _cancelled_reads(address, requests, rng)
    return over_http | cancelled_reads | {"seconds": round(time.monotonic() - started, 1)}


async def redis_killed_under_load(
    seconds: float = 10.0, rate: float = 100.0, *, hang: bool = False
) -> dict[str, Any]:
    """Measure latencies under a steady load, with Redis and after it was killed (or hung).

    The load is `rate` requests per second of 16 new pairs. Each part lasts `seconds`; the second
    one starts when the breaker is open, and several probes occur in it. A latency counts from the
    moment at which the request was due. `failed`: not answered, not all good, or a wrong score,
    from the first request to the last.
    """
    with running_redis() as redis, _running_fake(redis.url) as url:
        async with _steady_load(url, rate) as answers:
            await asyncio.sleep(1.0)  # warm-up
            with_redis = await _watch(answers, seconds)
            killed = time.monotonic()
            _strike(redis, hang)
            await _wait_for_breaker(url)
            noticed = time.monotonic()
            without = await _watch(answers, seconds)
        between = [a.seconds for a in answers if killed - 0.2 <= a.due <= noticed]
        counts = await _counts(url)
    return {
        "requests": len(answers),
        "failed": sum(not answer.good for answer in answers),
        "p50_ms_with_redis": _percentile(with_redis, 50),
        "p99_ms_with_redis": _percentile(with_redis, 99),
        "p50_ms_breaker_open": _percentile(without, 50),
        "p99_ms_breaker_open": _percentile(without, 99),
        "added_p99_ms": round(_percentile(without, 99) - _percentile(with_redis, 99), 2),
        "worst_ms_until_noticed": round(1e3 * max(between), 2),
        "noticed_after_ms": round(1e3 * (noticed - killed), 1),
        "failed_reads_and_probes": counts["cache_errors_total"],
    }


async def _leaving_clients(url: str, requests: int, rng: random.Random) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    seen = 0

    async def run_once(client: httpx.AsyncClient) -> None:
        nonlocal seen
        samples = _samples((rng.randrange(seen + 1), seen := seen + 1) for _ in range(4))
        asking = asyncio.create_task(client.post(f"{url}/v1/score", json={"samples": samples}))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0, 0.03))
            asking.cancel()
        try:
            response = await asking
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        except httpx.HTTPError:
            outcomes["failed"] += 1
        else:
            outcomes["answered"] += 1
            outcomes[_verdict(samples, response)] += 1

    async with httpx.AsyncClient(timeout=60, limits=UNBOUNDED) as client:
        await _spread(requests, lambda: run_once(client))
    counts = await _counts(url)
    return {
        "requests": requests,
        "answered": outcomes["answered"],
        "cancelled": outcomes["cancelled"],
        "failed": outcomes["failed"],
        "wrong": outcomes["wrong"],
        "samples_from_redis": counts['cache_hits_total{tier="tier"}'],
        "damaged_values": counts["cache_damaged_total"],
        "failed_reads": counts["cache_errors_total"],
    }


async def _cancelled_reads(address: str, num_reads: int, rng: random.Random) -> dict[str, Any]:
    values = {f"{i:016}".encode(): f'{{"score":{i}.5}}'.encode() for i in range(500)}
    keys = list(values)
    counts: Counter[str] = Counter()
    metrics = Metrics()
    tier = open_tier(address, name="chaos", max_bytes=2**20, redis_password=None)
    cache = Cache(0, tier, metrics, None)

    async def run_once() -> None:
        requested_keys = rng.sample(keys, 4)
        call = asyncio.create_task(cache.fetch(requested_keys))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0, 0.008))
            call.cancel()
        try:
            got = await call
        except asyncio.CancelledError:
            counts["cancelled"] += 1
        else:
            counts["found"] += len(got)
            counts["wrong"] += any(values[key] != value for key, value in got.items())

    await cache.store(values)
    await _spread(num_reads, run_once)
    await cache.close()
    damaged = metrics.registry.get_sample_value("scorekit_cache_damaged_total")
    return {
        "reads": num_reads,
        "reads_cancelled": counts["cancelled"],
        "reads_wrong": counts["wrong"],
        "values_read": counts["found"],
        "reads_damaged_values": damaged,
    }


@dataclass(slots=True)
class Answer:
    """Describes a request.

    due: when it should have been sent.
    seconds: from then to its answer.
    """

    due: float
    seconds: float
    good: bool


@contextlib.asynccontextmanager
async def _steady_load(url: str, rate: float) -> AsyncIterator[list[Answer]]:
    """Send requests at fixed times, and yield the growing list of answers.

    A request does not wait for the answers of earlier ones.
    """
    answers: list[Answer] = []
    open_requests: set[asyncio.Task[None]] = set()

    async def run_once(client: httpx.AsyncClient, number: int, due: float) -> None:
        samples = _samples((16 * number + i,) for i in range(16))
        good = False
        with contextlib.suppress(httpx.HTTPError):
            response = await client.post(f"{url}/v1/score", json={"samples": samples})
            seconds = time.monotonic() - due
            good = _verdict(samples, response) == "right"
        answers.append(Answer(due, seconds if good else time.monotonic() - due, good))

    async def send() -> None:
        started = time.monotonic()
        for number in range(10**9):
            due = started + number / rate
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.create_task(run_once(client, number, due))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)

    async with httpx.AsyncClient(timeout=60, limits=UNBOUNDED) as client:
        sending = asyncio.create_task(send())
        try:
            yield answers
        finally:
            sending.cancel()
            await asyncio.gather(*open_requests)


async def _watch(answers: list[Answer], seconds: float) -> list[float]:
    """Wait so many seconds, and return the latencies of the requests that were due meanwhile."""
    start = time.monotonic()
    await asyncio.sleep(seconds)
    return [answer.seconds for answer in answers if answer.due >= start]


def _strike(redis: RedisProcess, hang: bool) -> None:
    if hang:
        redis.hang()
    else:
        redis.kill()


async def _wait_for_breaker(url: str) -> None:
    while not (await _counts(url))["cache_breaker_open"]:
        await asyncio.sleep(0.01)


async def _counts(url: str) -> dict[str, float]:
    """Return the service's metrics, without their common prefix."""
    async with httpx.AsyncClient(timeout=60, limits=UNBOUNDED) as client:
        text = (await client.get(f"{url}/metrics")).text
    lines = re.findall(r"^scorekit_(\S+) (\S+)$", text, re.M)
    return {name: float(value) for name, value in lines}


async def _spread(count: int, run_once: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `one` so many times, CALLERS at once."""

    async def run_share(share: int) -> None:
        for _ in range(share):
            await run_once()

    shares = [count // CALLERS + (i < count % CALLERS) for i in range(CALLERS)]
    await asyncio.gather(*map(run_share, shares))


def _samples(numbers: Any) -> list[dict[str, str]]:
    return [{"src": f"source {n}", "mt": f"번역 {n}"} for group in numbers for n in group]


def _verdict(samples: list[dict[str, str]], response: httpx.Response) -> str:
    """Return how a response is to be judged.

    right: all scores are right. wrong: a score is not the function of its texts. failed: no score.
    """
    if response.status_code != 200:
        return "failed"
    results = response.json()["results"]
    if len(results) != len(samples) or not all(result["ok"] for result in results):
        return "failed"
    right = [fake_score(TranslationSample(**sample), 25.0) for sample in samples]
    return "right" if [result["score"] for result in results] == right else "wrong"


def _percentile(seconds: list[float], percent: int) -> float:
    return round(1e3 * statistics.quantiles(seconds, n=100)[percent - 1], 2)


@contextlib.contextmanager
def _running_fake(cache: str) -> Iterator[str]:
    """Start a fake service with that cache and no memory cache, and yield its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ("--port", str(port), "--cache", cache, "--cache-memory-items", "0")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "fake.log"
        with running("scorekit.server.fake", *flags, log=log) as process:
            deadline = time.monotonic() + READY_S
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health/ready").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text(encoding="utf-8", errors="replace"))
                time.sleep(0.02)
            yield url


async def _main(requests: int) -> dict[str, Any]:
    return {
        "random_cancellations": await random_cancellations(requests),
        "redis_killed_under_load": await redis_killed_under_load(),
        "redis_hung_under_load": await redis_killed_under_load(hang=True),
    }


if __name__ == "__main__":
    exit_on_sigterm()
    with clean_exit(stdout="log"):
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
        print(json.dumps(asyncio.run(_main(count)), indent=2))
