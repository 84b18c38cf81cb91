"""The control: services whose answers belong to other texts.

Two proxies are between the trainer and the real services. A sample of a request gets what the real
service says of **another** sample. It is drawn again for every request, from the last few hundred
samples that the policy wrote for other sources. Both proxies draw the same one, so a sample gets
the sequence reward and the error spans of one and the same other sample. So the rewards keep their
distribution, which changes with the policy, but do not depend on the rewarded text. To permute
within a request would not be enough: a request has the samples of one prompt, so the mean of a
prompt would stay true.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from testing.processes import serving

Pair = tuple[str, str]  # source, translation

POOL = 512  # samples to draw from: those of some eight updates


class Dealer:
    """Decides whose reward each sample gets.

    It draws when the first service asks for some samples. The other service gets the same draw,
    also if both ask at the same time, each from the thread of its server.
    """

    def __init__(self, pool: Sequence[Pair], seed: int) -> None:
        """Start with these samples.

        pool: samples of the start policy, which are drawn in the first updates.
        """
        self._pool: deque[Pair] = deque(pool, maxlen=POOL)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: dict[tuple[Pair, ...], tuple[str, list[Pair]]] = {}

    def deal(self, service: str, samples: Sequence[Pair]) -> list[Pair]:
        """Return for each sample the other sample whose reward it gets."""
        with self._lock:
            return self._deal(service, samples)

    def _deal(self, service: str, samples: Sequence[Pair]) -> list[Pair]:
        key = tuple(samples)
        if key in self._open and self._open[key][0] != service:
            return self._open.pop(key)[1]
        sources = {src for src, _ in samples}
        other_pairs = [pair for pair in self._pool if pair[0] not in sources]
        dealt = self._random.choices(other_pairs, k=len(samples))
        self._pool.extend(samples)
        self._open[key] = (service, dealt)
        return dealt


def fit_spans(spans: Sequence[dict[str, Any]], other: str, mt: str) -> list[dict[str, Any]]:
    """Scale the error spans of `other` to the length of `mt`, so that the same share is marked.

    A span that becomes empty is left out.
    """
    fitted = []
    for span in spans:
        start, end = (round(span[k] * len(mt) / max(1, len(other))) for k in ("start", "end"))
        if start < end:
            fitted.append({**span, "start": start, "end": end, "text": mt[start:end]})
    return fitted


def shuffling_proxy(service: str, url: str, dealer: Dealer) -> Starlette:
    """Return a proxy for the service at `url` that answers with the results of the samples that
    `dealer` names.
    """
    client = httpx.AsyncClient(base_url=url, timeout=600)

    async def info(request: Request) -> JSONResponse:
        return JSONResponse((await client.get("/v1/info")).json())

    async def score(request: Request) -> JSONResponse:
        body = await request.json()
        samples = [(sample["src"], sample["mt"]) for sample in body["samples"]]
        dealt = dealer.deal(service, samples)
        forwarded = body | {
            "samples": [
                {**sample, "src": src, "mt": mt}
                for sample, (src, mt) in zip(body["samples"], dealt, strict=True)
            ]
        }
        reply = await client.post("/v1/score", json=forwarded)
        answer = reply.json()
        if reply.status_code == 200:
            for result, (_, mt), (_, other) in zip(answer["results"], samples, dealt, strict=True):
                if result["ok"]:
                    result["mt_covered"] = len(mt)
                    spans = result.get("error_spans")
                    if spans is not None:
                        result["error_spans"] = fit_spans(spans, other, mt)
        return JSONResponse(answer, reply.status_code)

    return Starlette(routes=[Route("/v1/info", info), Route("/v1/score", score, methods=["POST"])])


@contextlib.contextmanager
def shuffled(urls: dict[str, str], pool: Sequence[Pair], seed: int) -> Iterator[dict[str, str]]:
    """Start the proxies for the services at `urls`, and yield their URLs."""
    dealer = Dealer(pool, seed)
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(serving(shuffling_proxy(name, url, dealer)))
            for name, url in urls.items()
        }
