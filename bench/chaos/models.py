"""Send SIGTERM while real models compute, with clients that have left and one that waits.

The fake of bench/chaos/endurance.py sleeps in Python. Only real models show what a thread does
inside torch while the process ends. These are the demo's two, in batches of about a second.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from bench.chaos.supervised import Supervised
from bench.common import ROOT, Measurement

MODELS = ("metricx", "xcomet")
LONG = "the house on the hill and the road to the sea " * 4


def models_terminated(sigterms: int) -> Iterator[Measurement]:
    """Terminate both services at work; each is restarted after its end."""
    counts = asyncio.run(terminate_at_work(sigterms))
    yield Measurement(
        f"{sigterms} SIGTERMs while the demo's models compute for clients that have left: "
        "other exit codes than 0",
        counts["bad_exits"],
        "",
        at_most=0,
        details=counts,
    )
    yield Measurement(
        "  clients that waited and got neither scores nor a refusal",
        counts["unanswered"],
        "",
        at_most=0,
    )


async def terminate_at_work(sigterms: int) -> dict[str, Any]:
    """Return counts of exit codes, of signals during a batch, and of missing answers."""
    tallies = await asyncio.gather(*(_terminate(name, sigterms // len(MODELS)) for name in MODELS))
    codes = sum((tally[0] for tally in tallies), Counter[int]())
    return {
        "signals": codes.total(),
        "signals_that_met_work": sum(tally[1] for tally in tallies),
        "exit_codes": {str(code): count for code, count in codes.items()},
        "bad_exits": codes.total() - codes[0],
        "unanswered": sum(tally[2] for tally in tallies),
    }


async def _terminate(name: str, times: int) -> tuple[Counter[int], int, int]:
    codes: Counter[int] = Counter()
    met = unanswered = 0
    service = Supervised(
        f"services.{name}",
        "--model",
        str(ROOT / "demo/models" / name),
        "--cache",
        "memory",
        "--threads",
        "1",
        "--max-batch-tokens",
        "4096",
    )
    try:
        await service.start()
        chance = random.Random(name)
        for turn in range(times):
            await _leave(service, turn)
            waits = asyncio.create_task(_answered(service.url, turn)) if turn % 2 else None
            await asyncio.sleep(chance.uniform(0.0, 0.2))  # anywhere in a batch
            met += await service.has_work(0.5)
            codes[await service.signal_and_restart(signal.SIGTERM)] += 1
            unanswered += waits is not None and not await waits
    finally:
        await service.end()
    return codes, met, unanswered


async def _leave(service: Supervised, turn: int) -> None:
    """Request hundreds of samples, and disconnect while the model has the first of them."""
    samples = [{"src": f"{turn} {index} {LONG}", "mt": LONG} for index in range(400)]
    async with httpx.AsyncClient() as client:
        request = asyncio.create_task(
            client.post(f"{service.url}/v1/score", json={"samples": samples}, timeout=60)
        )
        assert await service.has_work(60.0)
        request.cancel()
        await asyncio.wait([request])


async def _answered(url: str, turn: int) -> bool:
    """Return whether a waiting client gets all its scores, or a well-formed refusal."""
    samples = [{"src": f"waits {turn} {index}", "mt": "m"} for index in range(8)]
    async with httpx.AsyncClient(timeout=120) as client:
        try:
            answer = await client.post(f"{url}/v1/score", json={"samples": samples})
        except httpx.HTTPError:
            return False
    return answer.status_code == 503 or all(r["ok"] for r in answer.json()["results"])
