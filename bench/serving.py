"""Measure the cost of HTTP when the model costs little or nothing.

The backend is the fake one: its answers are a function of the texts, so each one is checked. The
service is one process on one core, the load comes from another core.

    python -m bench.serving [--quick]
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from bench.common import Measurement, compare, on_core, quiet_logs, run, service
from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.fake import FakeBackend
from scorekit.server.local import LocalScorer
from testing.load import (
    Background,
    batches,
    check,
    distinct_samples,
    encode,
    expected_scores,
    send_and_time,
)
from testing.servers import running_service

FAKE = "scorekit.server.fake"
SERVER, LOAD = 0, 1  # cores
REQUEST = 64  # pairs
KNOWN = 20  # pairs that are cached, where it is cached ones that are asked for
SECONDS_PER_PAIR = 0.01 / 64
Sample = dict[str, str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of the measurement."""

    repeats: int = 5
    http_pairs: int = 32_000  # against the backend in process: 5 s of its time a run
    load_requests: int = 2000  # of 64 pairs, a run
    single_requests: int = 2000  # of 1 pair, a run
    rollouts: int = 20


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(2, 1920, 40, 100, 2) if quick else Sizes()
    yield http_against_in_process(sizes)
    yield from throughput(sizes)
    yield from single_pairs(sizes)
    for module, load in ((FAKE, "sleeps"), ("bench.kit.busy", "burns Python")):
        yield from beside_a_busy_model(sizes, module, load)
    yield from duplicates(sizes.rollouts)


def http_against_in_process(sizes: Sizes) -> Measurement:
    """Measure requests of 64 pairs over HTTP against LocalScorer.

    Both have the same backend, which takes 10 ms for 64 pairs.
    """
    samples = distinct_samples(sizes.http_pairs)
    pairs = [SampleForScoring(s["src"], s["mt"]) for s in samples]
    scorer = LocalScorer(FakeBackend(seconds_per_pair=SECONDS_PER_PAIR))
    cfg = ScoringConfig(batch_size=len(pairs))
    flags = ("--cache", "memory", "--seconds-per-pair", str(SECONDS_PER_PAIR))
    with service(FAKE, *flags, core=SERVER) as (_, url), on_core(LOAD):
        with SyncScoringClient(url, batch_size=REQUEST) as client:
            client.score(pairs[:REQUEST], options={"cache": False})
            timing = compare(
                lambda: client.score(pairs, options={"cache": False}),
                lambda: scorer.score_batch(pairs, cfg),
                sizes.repeats,
            )
            results = client.score(pairs, options={"cache": False})
    assert [r.score for r in results if r.ok] == expected_scores(samples), "a score is wrong"
    timing["pairs"] = len(pairs)
    return Measurement(
        "HTTP against the same backend in process, 10 ms a 64 pairs",
        100 * timing["times_faster"],
        "% of its rate",
        at_least=95.0,
        details=timing,
    )


def throughput(sizes: Sizes) -> Iterator[Measurement]:
    """Measure requests of 64 distinct pairs with all features on, in turn with a bare FastAPI
    route.

    Pairs have 250 bytes. The route makes the same answers at once. Every answer is checked.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    costs: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        scorekit_process = stack.enter_context(service(FAKE, "--cache", "memory", core=SERVER))
        bare = stack.enter_context(service("bench.kit.bare", core=SERVER))
        stack.enter_context(on_core(LOAD))
        for turn in range(sizes.repeats + 1):  # the first one warms up
            count = sizes.load_requests // (1 if turn else 10)
            parts = batches(distinct_samples(count * REQUEST, turn * 10**7), REQUEST)
            requests = [encode(part) for part in parts]
            for (process, url), rate, cost in zip(
                (scorekit_process, bare), rates, costs, strict=True
            ):
                before = cpu_seconds(process)
                answers, seconds = send_and_time(url, requests, 8)
                cost.append((cpu_seconds(process) - before) / (count * REQUEST) * 1e6)
                rate.append(count * REQUEST / seconds)
                assert len(answers) == count
                for answer in answers:
                    check(answer, parts[answer.index])
    scorekit_median, bare_median = (statistics.median(runs[1:]) for runs in rates)
    details = {
        "runs": rates[0][1:],
        "bare_runs": rates[1][1:],
        "requests_a_run": sizes.load_requests,
    }
    yield Measurement(
        "fake backend, pairs of 250 bytes, 64 a request, one process, against a bare FastAPI route",
        scorekit_median / bare_median,
        "times its rate",
        details=details,
    )
    yield Measurement("  the rate itself", scorekit_median, "pairs/s")
    scorekit_median, bare_median = (statistics.median(runs[1:]) for runs in costs)
    details = {"runs_us": costs[0][1:], "bare_runs_us": costs[1][1:]}
    yield Measurement(
        "  processor time of the server a pair, against the bare route's",
        scorekit_median / bare_median,
        "times",
        details=details,
    )


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process, which other work on the machine hardly changes."""
    with open(f"/proc/{process}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def single_pairs(sizes: Sizes) -> Iterator[Measurement]:
    """Measure requests of one distinct pair, one at a time, in turn with a bare FastAPI route."""
    with ExitStack() as stack:
        _, scorekit_url = stack.enter_context(service(FAKE, "--cache", "memory", core=SERVER))
        _, bare = stack.enter_context(service("bench.kit.bare", core=SERVER))
        stack.enter_context(on_core(LOAD))
        runs = _alternate(scorekit_url, bare, sizes, distinct=True)
    yield from _add_up("1-pair requests", runs)


def beside_a_busy_model(sizes: Sizes, module: str, load: str) -> Iterator[Measurement]:
    """Measure requests of one cached pair while bulk work keeps the model thread busy.

    The bulk batches take 20 ms each. The pair is cached because another one would wait for the
    current batch, which is not a cost of the service. If the model burns CPU in Python, the bare
    route has such a thread, too. No process is bound to a core: on one core only the scheduler
    would decide who gets the interpreter.
    """
    burn = ("--burn",) if module != FAKE else ()
    with ExitStack() as stack:
        flags = ("--cache", "memory", "--seconds-per-batch", "0.02")
        _, scorekit_url = stack.enter_context(service(module, *flags))
        _, bare = stack.enter_context(service("bench.kit.bare", *burn))
        stack.enter_context(on_core(LOAD))
        stack.enter_context(Background(scorekit_url))
        runs = _alternate(scorekit_url, bare, sizes, distinct=False)
    yield from _add_up(f"cached 1-pair requests, the model {load}", runs)


Latencies = list[tuple[list[float], list[float]]]


def _alternate(scorekit_url: str, bare: str, sizes: Sizes, *, distinct: bool) -> Latencies:
    """Return the milliseconds of each request of both sides, for each run."""
    runs: Latencies = []
    for turn in range(sizes.repeats + 1):  # the first one warms up, and fills the cache
        count = sizes.single_requests if turn else KNOWN
        if distinct:
            samples = distinct_samples(count, turn * 10**7)
        else:
            samples = (distinct_samples(KNOWN) * count)[:count]
        requests = [encode([sample]) for sample in samples]
        pair = []
        for url in (scorekit_url, bare):
            answers, _ = send_and_time(url, requests, 1)
            for answer in answers:
                check(answer, [samples[answer.index]])
            pair.append([answer.seconds * 1000 for answer in answers])
        runs.append((pair[0], pair[1]))
    return runs[1:]


def _add_up(title: str, runs: Latencies) -> Iterator[Measurement]:
    """Compare our p50 and p99 with those of the bare route: medians over the runs."""
    for name, quantile in (("p50", 50), ("p99", 99)):
        scorekit_ms, bare_ms = ([_percentile(run[k], quantile) for run in runs] for k in (0, 1))
        details = {
            "requests_a_run": len(runs[0][0]),
            "ours_runs_ms": scorekit_ms,
            "bare_runs_ms": bare_ms,
        }
        yield Measurement(
            f"{title}: {name}, against a bare FastAPI route",
            statistics.median(a / b for a, b in zip(scorekit_ms, bare_ms, strict=True)),
            "times its time",
            details=details,
        )
        yield Measurement(
            f"  {name} above it",
            statistics.median(a - b for a, b in zip(scorekit_ms, bare_ms, strict=True)),
            "ms",
        )
        yield Measurement(f"  {name} itself", statistics.median(scorekit_ms), "ms")


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def duplicates(rollouts: int, callers: int = 8, candidates: int = 128) -> Iterator[Measurement]:
    """Measure concurrent callers with 128 candidates each, rollout after rollout.

    Half of all samples are duplicates: of the same caller's list, of another caller's, or of an
    earlier rollout's.
    """
    chance = random.Random(1)
    backend = FakeBackend(seconds_per_batch=0.002)
    half = callers * candidates // 2
    pool: list[Sample] = []

    async def rollout(client: ScoringClient, lists: list[list[Sample]]) -> None:
        for samples, results in zip(
            lists, await asyncio.gather(*map(client.score, lists)), strict=True
        ):
            assert [r.score for r in results if r.ok] == expected_scores(samples)

    async def all_rollouts(url: str) -> None:
        async with ScoringClient(url, batch_size=candidates) as client:
            for turn in range(rollouts):
                new = distinct_samples(half, turn * half)
                pool.extend(new)
                mixed = new + chance.choices(pool, k=half)
                chance.shuffle(mixed)
                await rollout(client, [list(part) for part in batches(mixed, candidates)])

    quiet_logs()
    with running_service(backend) as url:
        before = sum(backend.batches)  # a warm-up's
        asyncio.run(all_rollouts(url))
        seen = sum(backend.batches) - before
    details = {"samples_sent": 2 * len(pool), "distinct": len(pool), "seen_by_the_model": seen}
    yield Measurement(
        f"{callers} callers x {candidates} candidates x {rollouts} rollouts, half "
        "duplicates: times the model sees a distinct sample",
        seen / len(pool),
        "",
        at_least=1.0,
        at_most=1.0,
        details=details,
    )


if __name__ == "__main__":
    run("serving", __doc__, questions)
