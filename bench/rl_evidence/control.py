"""The control: services whose answers are about other texts.

Two proxies stand between the trainer and the real services. Each sample of a request is answered
with what the real service says of **another** sample, drawn anew for every request from the last
few hundred that the policy wrote for other sources. Both proxies draw the same one, so that a
sample gets sequence reward and error spans of one and the same other sample. So the rewards keep
their distribution, which moves with the policy, and lose every link to the text that they reward.
Permuting inside a request would not do: a request holds the samples of one prompt, and the mean of
a prompt would stay true.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from demo.processes import serving

Pair = tuple[str, str]  # source, translation

POOL = 512  # samples to draw from: those of some eight updates


class Dealer:
    """Who gets whose reward. The first service that asks for some samples has them dealt; the
    other one gets the same deal."""

    def __init__(self, pool: Sequence[Pair], seed: int) -> None:
        """pool: samples of the start policy, to draw from in the first updates."""
        self._pool: deque[Pair] = deque(pool, maxlen=POOL)
        self._random = random.Random(seed)
        self._open: dict[tuple[Pair, ...], tuple[str, list[Pair]]] = {}

    def deal(self, service: str, samples: Sequence[Pair]) -> list[Pair]:
        """Return for each sample the other sample whose reward it gets."""
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
    """Error spans of `other`, stretched to the length of `mt`: the same share of the text is
    marked. A span that shrinks to nothing is left out."""
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
    """URLs of the proxies for the services at `urls`."""
    dealer = Dealer(pool, seed)
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(serving(shuffling_proxy(name, url, dealer)))
            for name, url in urls.items()
        }
