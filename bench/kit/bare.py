"""A bare FastAPI route that reads and answers what /v1/score does: the minimum time of a service.

python -m bench.kit.bare --port 8009 [--burn]
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI

from bench.kit.busy import burn
from scorekit.command import run_command
from scorekit.schemas import MetricXOptions, TranslationSample
from scorekit.server.fake import fake_score
from scorekit.server.score_endpoint import score_request

ScoreRequest = score_request(TranslationSample, MetricXOptions, 10_000)

app = FastAPI()


@app.get("/health/ready")
async def ready() -> dict[str, bool]:
    """Answer the readiness check like a service does."""
    return {"ready": True}


@app.post("/v1/score")
async def score(request: ScoreRequest) -> dict[str, Any]:  # type: ignore[valid-type]
    """Return the same answer, made at once: no queue, no cache, no limits, no log."""
    return {
        "model": {"service": "metricx", "id": "bare", "revision": "bare"},
        "results": [
            {
                "id": sample.id,
                "ok": True,
                "cached": False,
                "score": fake_score(sample, 25.0),
                "tokens": 1,
                "truncated": {"src": False, "mt": False, "ref": False},
                "mt_covered": len(sample.mt),
            }
            for sample in request.samples  # type: ignore[attr-defined]
        ],
    }


def main() -> None:
    """Serve with the settings that a service gives uvicorn."""
    parser = argparse.ArgumentParser(description="A bare FastAPI route to compare with.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--burn", action="store_true", help="beside a thread that burns CPU")
    args = parser.parse_args()
    sys.setswitchinterval(0.0005)
    if args.burn:
        threading.Thread(target=burn, args=(float("inf"),), daemon=True).start()
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_config=None, access_log=False)


if __name__ == "__main__":
    run_command(main, stdout="log")
