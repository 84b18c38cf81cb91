"""A load generator that needs little CPU: encoded requests on raw keep-alive connections.

Answers are kept as bytes and checked after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json, to_json

from scorekit.schemas import TranslationSample
from scorekit.server.fake import fake_score
from testing.pairs import read_pairs

PAIR_BYTES = 250
TOP = 25.0  # of the fake MetricX's scores


@dataclass(slots=True)
class Answer:
    """Holds the response to a request, and its seconds."""

    index: int
    status: int
    body: bytes
    seconds: float


def distinct_samples(count: int, start: int = 0) -> list[dict[str, str]]:
    """Return distinct pairs of 250 bytes made of real words; another `start` gives other pairs."""
    words = _words()
    half = PAIR_BYTES // 2 - 10
    return [
        {
            "src": f"{number:09d} " + words[number * 7 % 20_000 :][:half].ljust(half, "."),
            "mt": f"{number:09d} " + words[number * 11 % 20_000 :][:half].ljust(half, "."),
        }
        for number in range(start, start + count)
    ]


@functools.cache
def _words() -> str:
    text = " ".join(pair.src for pair in read_pairs(1000)).encode("ascii", "ignore").decode()
    return text.replace("nan", "non")  # the fake answers NaN to that


def encode(samples: Sequence[dict[str, str]], **options: object) -> bytes:
    """Return a full HTTP request."""
    body = to_json({"samples": list(samples), **options})
    head = (
        "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def expected_scores(samples: Sequence[dict[str, str]]) -> list[float]:
    """Return the scores of a fake MetricX."""
    return [
        fake_score(TranslationSample.model_construct(src=s["src"], mt=s["mt"], ref=None), TOP)
        for s in samples
    ]


def check(answer: Answer, samples: Sequence[dict[str, str]]) -> None:
    """Raise unless each sample has its own score."""
    assert answer.status == 200, f"HTTP {answer.status}: {answer.body[:200]!r}"
    results = from_json(answer.body)["results"]
    scores = [result["score"] if result["ok"] else result["error"] for result in results]
    assert scores == expected_scores(samples), "a score is wrong"


class _Connection(asyncio.Protocol):
    """A connection that sends the next request as soon as it has an answer."""

    def __init__(self, requests: Iterator[tuple[int, bytes]], answers: list[Answer]) -> None:
        self.requests = requests
        self.answers = answers
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self._send()

    def _send(self) -> None:
        following = next(self.requests, None)
        if following is None:
            self.done.set_result(None)
            self.transport.close()
            return
        self.index, request = following
        self.body = bytearray()
        self.started = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        seconds = time.perf_counter() - self.started
        status = self.parser.get_status_code()
        self.answers.append(Answer(self.index, status, bytes(self.body), seconds))
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the service closed the connection"))


async def send(url: str, requests: Iterable[bytes], connections: int) -> list[Answer]:
    """Return all answers, by order of completion; each connection has one request out at a
    time.
    """
    parsed_url = urlsplit(url)
    assert parsed_url.hostname is not None and parsed_url.port is not None
    host, port = parsed_url.hostname, parsed_url.port
    numbered = iter(enumerate(requests))
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: _Connection(numbered, answers), host, port)
        for _ in range(connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in opened))
    return answers


def send_and_time(
    url: str, requests: Sequence[bytes], connections: int
) -> tuple[list[Answer], float]:
    """Return the answers, and the total seconds."""
    started = time.perf_counter()
    answers = asyncio.run(send(url, requests, connections))
    return answers, time.perf_counter() - started


def batches(samples: Sequence[dict[str, str]], size: int) -> list[Sequence[dict[str, str]]]:
    """Split the samples into batches of adjacent ones, `size` each."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


class Background:
    """Keeps a service's model busy from a thread: distinct bulk pairs until the block ends."""

    def __init__(self, url: str, connections: int = 2) -> None:
        self._url, self._connections, self._stop = url, connections, False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _requests(self) -> Iterator[bytes]:
        for number in itertools.count(10**8, 64):
            if self._stop:
                return
            yield encode(distinct_samples(64, number), priority="bulk", options={"cache": False})

    def _run(self) -> None:
        asyncio.run(send(self._url, self._requests(), self._connections))

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
