"""A service as a process, with a slow fake model, for tests of its start and its end."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from testing.servers import PATIENCE_S, free_port, wait_until
from tests.kits import forked

ROOT = Path(__file__).parents[2]
#: A service with a slow fake in place of a model, run the way the real ones are.
#: It loads, and answers others than its warm-up, once the files named here exist.
FAKE = """
import time
from pathlib import Path
from scorekit.server.fake import FakeBackend
from scorekit.server.run import main
from scorekit.server.settings import ServiceSettings

class Slow(FakeBackend):
    answers_when = Path("/")

    def load(self):
        while not Path({loads_when!r}).exists():
            time.sleep(0.01)
        {load_extra}
        return super().load()

    def encode(self, samples, options):
        if not samples[0].src.startswith("word "):  # not the warm-up's
            self.seconds_per_batch = {batch_s}
            self.answers_when = Path({answers_when!r})
            {then}
        return super().encode(samples, options)

    def forward(self, batch):
        while not self.answers_when.exists():
            time.sleep(0.01)
        return super().forward(batch)

main(ServiceSettings, lambda s: Slow(poison='poison'))
"""


@contextlib.contextmanager
def fake_service(
    *flags: str,
    loads_when: str | Path = "/",
    answers_when: str | Path = "/",
    batch_s: float = 0.0,
    load_extra: str = "pass",
    then: str = "pass",
    first: str = "pass",
    stderr: int = subprocess.PIPE,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process of `FAKE`; yield it and its URL, and kill it when the block ends.

    load_extra, then, first: code that runs in `load`, in `encode` and before all."""
    port = free_port()
    code = f"{first}\n" + FAKE.format(
        loads_when=str(loads_when),
        answers_when=str(answers_when),
        batch_s=batch_s,
        load_extra=load_extra,
        then=then,
    )
    process = forked.Popen(
        [sys.executable, "-c", code, "--port", str(port), "--cache", "memory", *flags],
        stderr=stderr,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def post(url: str, i: object, **kwargs: Any) -> httpx.Response:
    """Ask for one sample."""
    return httpx.post(f"{url}/v1/score", json={"samples": [{"src": str(i), "mt": "m"}]}, **kwargs)


def is_up(url: str) -> bool:
    """Return whether the process lives."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/live").status_code == 200
    return False


def connect(url: str) -> socket.socket:
    """Return a socket with a small receive buffer."""
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return connection


def leave_work_behind(url: str, count: int = 1) -> None:
    """Request many long samples, and disconnect while the model has some of them."""
    samples = [{"src": f"{i} and a house on the hill", "mt": "집 " * 40} for i in range(count)]
    body = json.dumps({"samples": samples}).encode()
    with connect(url) as client:
        client.sendall(
            b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        client.sendall(body)
        wait_until(lambda: re.search("scorekit_queue_items [1-9]", _metrics(url)))
        if count > 1:  # a first batch is done: the model has the next one
            wait_until(lambda: not re.search("scorekit_tokens_total 0.0", _metrics(url)))
    wait_until(lambda: 'status="499"' in _metrics(url))


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
