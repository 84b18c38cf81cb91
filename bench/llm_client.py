"""Measure how many chat requests per second of one core our LLM client can send.

The server is a separate process that parses almost nothing and answers at once. Our
client and the OpenAI SDK (without its retries, as a driver would use it) take turns. CPU seconds of
the client are counted.

    python -m bench.llm_client [--quick]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.common import Measurement, quiet_logs, run
from scorekit.llm import LLMClient, Sampling
from scorekit.processes import end_worker_with_parent
from testing.processes import free_port

MESSAGES = [
    {"role": "system", "content": "You are a professional translator."},
    {"role": "user", "content": "Translate: " + "a sentence of some words. " * 30},
]
ANSWER = "번역된 문장은 이만큼 길다. " * 10
#: Requests a second on one core.
AIM = 1000


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    count, repeats = (300, 2) if quick else (2000, 5)
    with instant_server() as url:
        for at_once in (32, 256):
            client_times, sdk_times = [], []
            for _ in range(repeats):
                client_times.append(asyncio.run(_time_llm_client(url, at_once, count)))
                sdk_times.append(asyncio.run(_sdk(url, at_once, count)))
            client_s, sdk_s = map(statistics.median, (client_times, sdk_times))
            yield Measurement(
                f"chat requests, {at_once} at once, one process",
                client_s,
                "a CPU second",
                at_least=AIM,
                details={"ours": client_times, "sdk": sdk_times},
            )
            yield Measurement(
                f"  against the OpenAI SDK, {at_once} at once", client_s / sdk_s, "times"
            )


async def _time_llm_client(url: str, at_once: int, count: int) -> float:
    async with LLMClient(url, "m", max_concurrency=at_once) as client:
        sampling = Sampling(512, seed=7)
        return await _per_cpu_second(
            at_once, count, lambda: client.chat(MESSAGES, sampling, request_id="r")
        )


async def _sdk(url: str, at_once: int, count: int) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.with_raw_response.create
        return await _per_cpu_second(
            at_once,
            count,
            lambda: create(model="m", messages=MESSAGES, max_tokens=512, temperature=1.0, seed=7),
        )


async def _per_cpu_second(at_once: int, count: int, ask: Callable[[], Awaitable[Any]]) -> float:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await ask()

    await ask()  # what is imported and connected first is no matter
    started = time.process_time()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return count / (time.process_time() - started)


@contextmanager
def instant_server() -> Iterator[str]:
    """Start a chat server in a separate process that answers at once; yield its URL."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.join()


def _wait_for(port: int) -> None:
    import socket

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the server did not start")


class _Instant(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._read = transport, b""
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        body = json.dumps(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        ).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._answer = f"{head}\r\n\r\n".encode() + body

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            _, _, after_name = self._read[:end].lower().partition(b"content-length: ")
            total = end + 4 + int(after_name.partition(b"\r\n")[0] or 0)
            if len(self._read) < total:
                return
            self._read = self._read[total:]
            self._transport.write(self._answer)  # type: ignore[attr-defined]


def _serve(port: int) -> None:
    end_worker_with_parent()

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Instant, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    quiet_logs()
    run("llm_client", __doc__, questions)
