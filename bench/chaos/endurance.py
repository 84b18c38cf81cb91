"""Tests of robustness in their long form: each failure is tried very often.

Each proof is a function with its sizes as parameters;
tests/integration/deploy/test_strength.py runs the same ones with tiny sizes.
"""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.chaos.models import models_terminated
from bench.chaos.redis import random_cancellations, redis_killed_under_load
from bench.chaos.supervised import Supervised, pair_of_services
from bench.common import Measurement, on_core, quiet_logs, service
from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.load import (
    Answer,
    batches,
    check,
    distinct_samples,
    encode,
    expected_scores,
    send,
    send_and_time,
)
from testing.servers import running_service

FAKE = "scorekit.server.fake"
CALL = 64  # samples of one call of the client
CACHED: int = ServiceSettings.model_fields["cache_memory_items"].default


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements."""
    yield from models_terminated(4 if quick else 200)
    yield from services_killed(*((6, 3) if quick else (800, 100)))
    for module, load in ((FAKE, "sleeps"), ("bench.kit.busy", "burns Python")):
        yield from queue_full(module, load, refusals=50 if quick else 2000)
    yield from one_poison_sample()
    yield from memory(*((40_000, 10_000) if quick else (1_000_000, 100_000)))
    yield from redis_proofs(quick)


# -- kills ----------------------------------------------------


def services_killed(sigterms: int, kills: int) -> Iterator[Measurement]:
    """Kill two fake services under load behind one client, and count the errors of the answers.

    The services get signals in turn, and each is restarted on its port at once. The next signal is
    sent only when the last service is ready again.
    """
    counts = asyncio.run(kill_under_load(sigterms, kills))
    yield Measurement(
        f"{sigterms:,} SIGTERMs and {kills} kill -9 under load: answers lost, doubled or wrong",
        counts["lost"] + counts["doubled"] + counts["wrong"],
        "",
        at_most=0,
        details=counts,
    )
    yield Measurement(
        "  SIGTERMs that did not end with exit code 0", counts["bad_exits"], "", at_most=0
    )


async def kill_under_load(sigterms: int, kills: int, callers: int = 16) -> dict[str, Any]:
    """Return counts of requested, answered, lost, doubled and wrong samples, and of bad exits."""
    tally = {"asked": 0, "answered": 0, "lost": 0, "doubled": 0, "wrong": 0}
    started = time.monotonic()
    # Slow enough that a signal always meets requests in the model, in the queue and on the wire.
    flags = ("--cache", "memory", "--seconds-per-pair", "0.0001")
    async with pair_of_services(FAKE, *flags) as services:
        urls = [process.url for process in services]
        async with ScoringClient(urls, max_in_flight=2 * callers, batch_size=16) as client:
            stop = asyncio.Event()
            load = [
                asyncio.create_task(_call_until(stop, client, tally, number, number % 2 == 1))
                for number in range(callers)
            ]
            signals = await _send_signals(services, sigterms, kills, load)
            stop.set()
            await asyncio.gather(*load)
    return tally | signals | {"seconds": time.monotonic() - started}


async def _send_signals(
    services: Sequence[Supervised], sigterms: int, kills: int, load: list[asyncio.Task[None]]
) -> dict[str, int]:
    """Send signals to the two services in turn, each while the service has work.

    The kills are spread evenly among the SIGTERMs. Returns how many signals met work, and how many
    exits were bad.
    """
    total = sigterms + kills
    bad = met = 0
    for number in range(total):
        # kills evenly spread: as many so far as their share says
        kill = (number + 1) * kills // total > number * kills // total
        target = services[number % 2]
        met += await target.has_work(10.0)
        code = await target.signal_and_restart(signal.SIGKILL if kill else signal.SIGTERM)
        bad += not kill and code != 0
        for task in load:
            if task.done():
                task.result()  # a caller ends before its time only by an error
    return {"signals": total, "signals_that_met_work": met, "bad_exits": bad}


async def _call_until(
    stop: asyncio.Event, client: ScoringClient, tally: dict[str, int], caller: int, stream: bool
) -> None:
    """Send calls of distinct samples one after another, and compare every answer with the truth."""
    turn = 0
    while not stop.is_set():
        samples = distinct_samples(CALL, (caller + 1) * 10**8 + turn * CALL)
        for index, sample in enumerate(samples):
            sample["id"] = f"{caller}-{turn}-{index}"
        answers: dict[int, list[Any]] = {}
        if stream:
            async for index, result in client.stream(samples):
                answers.setdefault(index, []).append(result)
        else:
            for index, result in enumerate(await client.score(samples)):
                answers.setdefault(index, []).append(result)
        count(tally, samples, answers)
        turn += 1


def count(
    tally: dict[str, int], samples: Sequence[dict[str, str]], answers: dict[int, list[Any]]
) -> None:
    """Add the answers of a call, by index of its samples, to the tally."""
    tally["asked"] += len(samples)
    for index, (sample, score) in enumerate(zip(samples, expected_scores(samples), strict=True)):
        results = answers.pop(index, [])
        tally["answered"] += len(results)
        tally["lost"] += not any(result.ok for result in results)
        tally["doubled"] += max(0, len(results) - 1)
        tally["wrong"] += sum(
            result.id != sample["id"] or (result.ok and result.score != score) for result in results
        )
    tally["wrong"] += len(answers)  # answers to what nobody asked


# -- overload and failures ----------------------------------------------------


def queue_full(module: str, load: str, refusals: int) -> Iterator[Measurement]:
    """Let sixteen callers of 64 samples share a queue of 256, so that most of them are refused."""
    flags = ("--cache", "memory", "--max-queue-items", "256", "--seconds-per-batch", "0.02")
    with service(module, *flags, core=0) as (_, url), on_core(1):
        accepted, refused = asyncio.run(overload(url, refusals))
    details = {
        "refusals": len(refused),
        "p99_ms": 1000 * sorted(refused)[len(refused) * 99 // 100],
        "accepted_requests_all_answered_right": accepted,
    }
    yield Measurement(
        f"queue full, the model {load}: a refusal takes",
        1000 * statistics.median(refused),
        "ms",
        at_most=10.0,
        details=details,
    )


async def overload(url: str, refusals: int, callers: int = 16) -> tuple[int, list[float]]:
    """Return the number of requests accepted and answered correctly, and the seconds of each
    refusal.

    Raises if an accepted request was not answered, or if a refusal was not a 429.
    """
    accepted = 0
    refused: list[float] = []

    async def caller(number: int) -> None:
        nonlocal accepted
        turn = 0
        while len(refused) < refusals:
            samples = distinct_samples(CALL, (number + 1) * 10**8 + turn * CALL)
            answer: Answer = (await send(url, [encode(samples)], 1))[0]
            if answer.status == 429:
                refused.append(answer.seconds)
                await asyncio.sleep(0.01)
                continue
            check(answer, samples)
            accepted += 1
            turn += 1

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return accepted, refused


def one_poison_sample(count: int = 256) -> Iterator[Measurement]:
    """Measure one sample that makes every batch raise, among others that are good."""
    quiet_logs()
    good, failures, calls = poison(count)
    max_calls = 2 * math.log2(count) + 1
    yield Measurement(
        f"one poison sample among {count}: good results",
        good,
        "",
        at_least=count - 1,
        at_most=count - 1,
        details={"failures": failures},
    )
    yield Measurement("  further model calls until it was alone", calls - 1, "", at_most=max_calls)


def poison(count: int) -> tuple[int, list[str], int]:
    """Return the number of good results, the error types, and the number of model calls."""
    samples = distinct_samples(count)
    samples[count // 3]["mt"] += " poison"
    backend = FakeBackend(poison="poison")
    with running_service(backend, max_batch_tokens=10**7) as url:
        before = len(backend.batches)  # a warm-up's
        with SyncScoringClient(url, batch_size=count) as client:
            results = client.score(samples)
        calls = len(backend.batches) - before
    right = [r.ok and r.score == s for r, s in zip(results, expected_scores(samples), strict=True)]
    return sum(right), [r.error.type for r in results if not r.ok], calls


# -- memory ----------------------------------------------------


def memory(total: int, step: int) -> Iterator[Measurement]:
    """Send distinct samples to one service with default settings and an in-memory cache.

    That cache fills at first, which counts as growth.
    """
    growth = _resident_series(total, step, "--cache", "memory")
    yield Measurement(
        f"{total:,} samples: growth of resident memory after the first {step:,}",
        growth["growth_mb"],
        "MB",
        at_most=50.0,
        details=growth,
    )
    if total > CACHED:
        full = growth["series_mb"][-(-CACHED // step) - 1 :]
        yield Measurement("  of it once the cache is full", full[-1] - full[0], "MB")


def _resident_series(total: int, step: int, *flags: str) -> dict[str, Any]:
    series = []
    with service(FAKE, *flags, core=0) as (process, url), on_core(1):
        for start in range(0, total, step):
            parts = batches(distinct_samples(step, start), 256)
            answers, _ = send_and_time(url, [encode(part) for part in parts], 8)
            assert len(answers) == len(parts)
            for answer in answers[::50]:
                check(answer, parts[answer.index])
            series.append(resident_mb(process))
    return {"growth_mb": series[-1] - series[0], "largest_mb": max(series), "series_mb": series}


def resident_mb(process: int) -> float:
    """Return the resident memory of a process (VmRSS), in units of 2**20 bytes."""
    with open(f"/proc/{process}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


# -- Redis ----------------------------------------------------


def redis_proofs(quick: bool) -> Iterator[Measurement]:
    """Yield the two measurements with Redis, of bench/chaos/redis.py."""
    requests, seconds = (500, 2.0) if quick else (100_000, 10.0)
    counts = asyncio.run(random_cancellations(requests))
    yield Measurement(
        f"{requests:,} requests and as many cache reads with random cancellations, a "
        "delaying proxy before Redis: wrong",
        counts["wrong"] + counts["reads_wrong"],
        "",
        at_most=0,
        details=counts,
    )
    for failure, hang in (("killed", False), ("hung", True)):
        counts = asyncio.run(redis_killed_under_load(seconds, hang=hang))
        yield Measurement(
            f"Redis {failure} under load: failed requests",
            counts["failed"],
            "",
            at_most=0,
            details=counts,
        )
        yield Measurement(
            "  p99 added once the breaker is open", counts["added_p99_ms"], "ms", at_most=5.0
        )
