"""Measure whether the judge uses all slots of its LLM server when a tenth of the answers is slow.

A fake LLM server answers in 0.2 s, and every tenth sample in 3 s, however many requests arrive at
once. Bulk: one caller with all samples. The minimum time is the sum of their seconds divided by the
number of concurrent requests that the judge may have. Interactive: another caller sends one sample
at a time in the meantime.

    python -m bench.judge_upstream [--quick]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request

from bench.common import Measurement, quiet_logs, run
from scorekit.client import SyncScoringClient
from testing.judge import GOOD, running_judge
from testing.servers import running_app

CONCURRENCY = 32
QUICK_S, SLOW_S = 0.2, 3.0
VERDICT = json.dumps({"pass": True, "reason_code": "ok", "notes": ""})


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    count = 64 if quick else 320
    with (
        running_app(_upstream()) as base,
        running_judge(upstream=f"{base}/v1", max_concurrency=CONCURRENCY) as url,
        SyncScoringClient(url, batch_size=count) as client,
    ):
        samples = [_sample(f"{i} {'slow' if i % 10 == 0 else ''}") for i in range(count)]
        waits: list[float] = []
        over = threading.Event()
        single_requests = threading.Thread(target=_ask_one_by_one, args=(url, waits, over))
        single_requests.start()
        started = time.monotonic()
        results = client.score(samples, priority="bulk")
        seconds = time.monotonic() - started
        over.set()
        single_requests.join()
    assert all(result.ok for result in results)
    min_s = sum(SLOW_S if i % 10 == 0 else QUICK_S for i in range(count)) / CONCURRENCY
    yield Measurement(
        f"judge on an LLM, {count} samples, a tenth slow: seconds over the least possible",
        seconds / max(min_s, SLOW_S),
        "",
        at_most=1.6,
        details={"seconds": seconds, "least_s": min_s, "concurrency": CONCURRENCY},
    )
    yield Measurement(
        "  an interactive sample meanwhile, median, over the upstream's own time",
        statistics.median(waits) / QUICK_S,
        "",
        details={"seconds": waits},
    )


def _upstream() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        user_text = (await request.json())["messages"][1]["content"]
        await asyncio.sleep(SLOW_S if "slow" in user_text else QUICK_S)
        message = {"role": "assistant", "content": VERDICT}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "choices": [choice]}

    return app


def _sample(text: str) -> dict[str, str]:
    return GOOD | {"candidate": f"집 {text}"}


def _ask_one_by_one(url: str, waits: list[float], over: threading.Event) -> None:
    with SyncScoringClient(url) as client:
        while not over.wait(0.1):
            started = time.monotonic()
            (result,) = client.score([_sample(f"interactive {len(waits)}")])
            waits.append(time.monotonic() - started)
            assert result.ok


if __name__ == "__main__":
    quiet_logs()
    run("judge_upstream", __doc__, questions)
