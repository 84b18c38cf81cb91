"""Check sizes that are allowed one by one: the memory of all requests together is bounded."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time

import httpx
import pytest

from scorekit.errors import RequestError, UserError
from scorekit.server.app import create_app
from scorekit.server.batcher import PIECE, PIECE_BYTES, TokenizerLine, TokenizeTask
from scorekit.server.connection import Connection
from scorekit.server.endpoint import VALUES_A_SAMPLE
from scorekit.server.fake import FakeBackend
from scorekit.server.pools import InFlightSample
from scorekit.server.receive import SAMPLE_BYTES, MemoryBudget
from scorekit.server.run import service_config
from scorekit.server.settings import ServiceSettings
from testing.servers import JSON, running_app, running_service, wait_ready, wait_until

MIB = 2**20


def test_bytes_are_bounded_for_all_together():
    budget = MemoryBudget(8 * MIB, MIB)
    first, second, third = budget.share(), budget.share(), budget.share()
    first.reserve(3 * MIB)
    second.reserve(3 * MIB)
    with pytest.raises(RequestError) as error_info:  # a quarter is reserved for small ones
        third.reserve(2 * MIB)
    assert error_info.value.type == "overloaded" and error_info.value.retry_after
    third.reserve(MIB)
    with pytest.raises(RequestError) as error_info:
        third.reserve(7 * MIB)
    assert error_info.value.type == "too_large"  # it would never fit
    first.close()
    first.close()
    assert budget.reserved == 4 * MIB
    third.count([None] * 100)
    assert third.size == MIB + 100 * SAMPLE_BYTES


def test_a_body_that_could_never_be_received_is_a_mistake_in_the_settings():
    with pytest.raises(UserError, match=r"--max-inflight-bytes 4096.*--max-body-bytes"):
        create_app(FakeBackend(), ServiceSettings(max_inflight_bytes=4096, max_body_bytes=4096))


@contextlib.contextmanager
def connections(url, count):
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(count)
        ]


@contextlib.contextmanager
def service(name="metricx", **settings):
    """Yield a service of the fake, and its budget."""
    checked = ServiceSettings(cache="memory", **settings)
    app = create_app(FakeBackend(name), checked)
    with running_app(app, service_config(app, checked)) as url:
        wait_ready(url)
        yield url, app.state.service.budget


PAIR = {"samples": [{"src": "a", "mt": "b"}]}
HALF_SENT = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 999999\r\n\r\n" + b" " * 700_000
)


def test_half_sent_bodies_hold_no_more_than_is_allowed_and_starve_nobody():
    """Check that stalled bodies are dropped for others, the longest first."""
    with service(max_inflight_bytes=2 * MIB, max_body_bytes=MIB) as (url, budget):
        with connections(url, 12) as senders:
            for sender in senders:
                with contextlib.suppress(ConnectionError):  # refused before all was sent
                    sender.sendall(HALF_SENT)
            wait_until(lambda: budget.reserved > MIB, 30)
            assert budget.reserved <= 2 * MIB
            filler = " " * 900_000
            wait_until(
                lambda: (
                    httpx.post(
                        f"{url}/v1/score", content=json.dumps(PAIR) + filler, headers=JSON
                    ).is_success
                ),
                30,
            )
            assert httpx.post(f"{url}/v1/score", json=PAIR).is_success
        wait_until(lambda: budget.reserved == 0, 30)


def test_who_comes_slowly_is_told_to_come_again():
    with service(max_inflight_bytes=2 * MIB, max_body_bytes=MIB) as (url, budget):
        with connections(url, 1) as (sender,):
            sender.sendall(HALF_SENT)
            wait_until(lambda: budget.reserved >= 700_000, 30)
            slow = next(iter(budget.receiving))
            slow.moved -= 10
            budget.max_bytes = 100_000  # no capacity remains
            assert httpx.post(f"{url}/v1/score", json=PAIR).is_success
            answer = sender.recv(65536)
        assert b" 429 " in answer.split(b"\r\n")[0] and b"retry-after: " in answer.lower()
        assert b"overloaded" in answer or b"overloaded" in sender.recv(65536)


def test_what_was_answered_refused_or_left_holds_nothing():
    with service(max_field_chars=1000) as (url, budget):
        httpx.post(f"{url}/v1/score", json=PAIR)
        httpx.post(f"{url}/v1/score", content=b"{" * 300_000, headers=JSON)
        httpx.post(f"{url}/v1/score", json={"samples": [{"src": "a", "mt": "x" * 300_000}]})
        httpx.post(f"{url}/v1/score/stream", json=PAIR)
        with httpx.stream("POST", f"{url}/v1/score/stream", json=PAIR):
            pass  # the answer is not read
        with connections(url, 1) as (sender,):
            sender.sendall(HALF_SENT)
            wait_until(lambda: budget.reserved > 0, 30)
        wait_until(lambda: budget.reserved == 0, 30)


@pytest.mark.parametrize("junk", [b"[],", b"{},", b"0,", b'"",', b'{"a":[]},'])
def test_millions_of_values_are_counted_before_they_are_parsed(junk):
    with service(max_samples=50) as (url, _):
        body = b'{"samples":[' + junk * 200_000 + b"{}]}"
        answer = httpx.post(f"{url}/v1/score", content=body, headers=JSON)
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "too_large"
        assert f"more than {VALUES_A_SAMPLE * 50 + 1000} values" in answer.text


@pytest.mark.parametrize(
    "body", [b'"' + rb"\"" * MIB, b" " * 2 * MIB, b"[" * MIB, b'"a' * MIB, b"\\" * MIB]
)
def test_a_body_that_is_no_json_is_looked_at_once(body):
    """Check the time: with an attempt from each position, a megabyte would take hours."""
    with service() as (url, budget):
        answer = httpx.post(f"{url}/v1/score", content=body, headers=JSON, timeout=60)
        assert answer.status_code in (413, 422)
        wait_until(lambda: budget.reserved == 0, 30)


def test_a_large_body_may_have_as_many_samples_as_any():
    """Check that quotes, brackets and escapes within texts are not counted as values."""
    texts = ['"[{,' * 20, "\\" * 41, "\n\\u0041", "가{]" * 30]
    samples = [{"id": f"{k}", "src": texts[k % 4], "mt": f"{k}{texts[k % 3]}"} for k in range(5000)]
    with service(max_samples=5000) as (url, budget):
        answer = httpx.post(f"{url}/v1/score", json={"samples": samples}, timeout=60)
        assert answer.status_code == 200
        results = answer.json()["results"]
        assert [r["id"] for r in results] == [s["id"] for s in samples]
        assert all(r["ok"] for r in results)
        wait_until(lambda: budget.reserved == 0, 30)


def test_equal_samples_give_a_long_answer_in_parts():
    """Request the spans of a text ten thousand times: 60 MB of JSON from 5 kB of answer."""
    mt = "word " * 60
    with running_service(FakeBackend("xcomet")) as url:
        body = {"samples": [{"src": "a", "mt": mt}] * 10_000}
        with httpx.stream("POST", f"{url}/v1/score", json=body, timeout=120) as answer:
            assert answer.status_code == 200 and "content-length" not in answer.headers
            raw_body = answer.read()
    results = json.loads(raw_body)["results"]
    assert len(results) == 10_000 and all(result == results[0] for result in results)
    assert len(results[0]["error_spans"]) == 60


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 0.2)
    body = json.dumps({"samples": [{"src": "a", "mt": "word " * 60}] * 10_000}).encode()
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with service("xcomet") as (url, budget), connections(url, 1) as (deaf,):
        deaf.sendall(head + body)
        assert deaf.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: budget.reserved == 0, 60)  # the connection was closed
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := deaf.recv(2**20):
                received += len(data)
    assert received < 30 * MIB  # of 60


def test_pieces_are_bounded_in_samples_and_bytes():
    def flights(sizes):
        return [InFlightSample(b"", None, "bulk", 1, time.monotonic(), size) for size in sizes]

    def piece_counts(sizes):
        line = TokenizerLine(threading.Condition(), PIECE)
        line.put(TokenizeTask(None, flights(sizes), None, "bulk"))
        while sum(counts) < len(sizes):
            task, samples = line.take()
            counts.append(len(samples))
            line.put_back(task)
        return counts

    counts = []
    assert piece_counts([10] * 600) == [PIECE, PIECE, 600 - 2 * PIECE]
    counts = []
    assert piece_counts([99_000] * 6 + [PIECE_BYTES * 3, 1]) == [2, 2, 2, 1, 1]


def test_a_packed_body_is_read_within_the_same_limits():
    body = json.dumps({"samples": [{"src": "a", "mt": "b"}]}).encode()
    bomb = gzip.compress(b" " * 10_000_000)  # 10 kB
    packed = gzip.compress(body)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with running_service(FakeBackend(), max_body_bytes=100_000) as url:

        def ask(content):
            answer = httpx.post(f"{url}/v1/score", content=content, headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("message")

        assert ask(packed) == (200, None)
        assert ask(gzip.compress(b"\xef\xbb\xbf" + body))[0] == 200
        assert ask(bomb) == (413, "body: more than 100000 bytes")
        assert ask(body) == (
            422,
            "body: not gzip: Error -3 while decompressing data: incorrect header check",
        )
        assert ask(packed[:-9]) == (422, "body: the gzip ends too early")
        assert ask(packed + b"x") == (422, "body: bytes after the end of the gzip")
        assert ask(b"") == (422, "body: the gzip ends too early")
        assert ask(gzip.compress(b"{"))[0] == 422
