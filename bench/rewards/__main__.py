"""Measure the wait of 200 concurrent callers for a composite reward of one service.

Each caller asks for one sample at a time, as verl and OpenRLHF do. The service is a fake behind
real HTTP, whose model takes 10 ms for a batch of any size. `CompositeReward` puts samples of all
callers into common requests; the baseline is one request a sample with the same client. Both run
in turn, three times; all texts are distinct.

    python -m bench.rewards [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

from bench.common import Measurement, run, service
from scorekit.client import ScoringClient
from scorekit.rewards import CompositeReward

CALLERS, CALLS, REPEATS = 200, 20, 3
FLAGS = ("--service", "xcomet", "--seconds-per-batch", "0.01", "--log-level", "warning")
#: Numbers of the texts, so that no cache has them.
_NUMBERS = count()

Score = Callable[[list[dict[str, str]]], Awaitable[bool]]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    calls, repeats = (2, 1) if quick else (CALLS, REPEATS)
    waits: dict[str, list[list[float]]] = {"composite": [], "one request a sample": []}
    totals: dict[str, list[float]] = {name: [] for name in waits}
    errors = dict.fromkeys(waits, 0)
    with service("scorekit.server.fake", *FLAGS) as (_, url):
        for _ in range(repeats):
            for name, measure in (("composite", _composite), ("one request a sample", _single)):
                started = time.perf_counter()
                seconds, failed = asyncio.run(measure(url, calls))
                totals[name].append(time.perf_counter() - started)
                waits[name].append(seconds)
                errors[name] += failed
    details: dict[str, Any] = {"callers": CALLERS, "calls_of_each": calls, "errors": errors}
    for name, runs in waits.items():
        for percent in (50, 99):
            values = [_percentile(seconds, percent) for seconds in runs]
            yield Measurement(
                f"{CALLERS} callers, {name}: p{percent} of a call",
                statistics.median(values) * 1000,
                "ms",
                details=details | {"runs_ms": [1000 * value for value in values]},
            )
        rates = [CALLERS * calls / total for total in totals[name]]
        yield Measurement(
            f"{CALLERS} callers, {name}: samples a second",
            statistics.median(rates),
            "1/s",
            details=details | {"runs": rates},
        )
    yield Measurement(f"{CALLERS} callers: errors", sum(errors.values()), "", at_most=0)


async def _composite(url: str, calls: int) -> tuple[list[float], int]:
    async with CompositeReward({"components": {"xcomet": {"service": url}}}) as reward:
        await reward.check()

        async def score(samples: list[dict[str, str]]) -> bool:
            return (await reward.score(samples))[0].reward is not None

        return await _callers(score, calls)


async def _single(url: str, calls: int) -> tuple[list[float], int]:
    async with ScoringClient(url, max_in_flight=256) as client:
        await client.limits()

        async def score(samples: list[dict[str, str]]) -> bool:
            return (await client.score(samples))[0].ok

        return await _callers(score, calls)


async def _callers(score: Score, calls: int) -> tuple[list[float], int]:
    """Return the seconds of each call, and the number of failed ones."""
    seconds: list[float] = []
    failed = 0

    async def caller() -> None:
        nonlocal failed
        for _ in range(calls):
            number = next(_NUMBERS)
            started = time.perf_counter()
            is_ok = await score([{"src": f"source {number}", "mt": f"translation {number}"}])
            seconds.append(time.perf_counter() - started)
            failed += not is_ok

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return seconds, failed


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    run("rewards", __doc__, questions)
