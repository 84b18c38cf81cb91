"""Test the shutdown of a service process: it answers accepted requests, then exits."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from testing.servers import PATIENCE_S, free_port, wait_ready, wait_until
from tests.kits import forked
from tests.kits.service_process import ROOT, connect, fake_service, is_up, leave_work_behind, post


def test_sigterm_answers_what_was_accepted_refuses_what_is_new_and_exits_0(tmp_path):
    with fake_service(answers_when=tmp_path / "go") as (process, url):
        wait_ready(url)
        accepted = []
        threads = [
            threading.Thread(target=lambda i=i: accepted.append(post(url, i, timeout=PATIENCE_S)))
            for i in range(3)
        ]
        [t.start() for t in threads]
        wait_until(lambda: "scorekit_queue_items 3.0" in httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        refused = post(url, "new")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["type"] == "unavailable"
        assert httpx.get(f"{url}/health/live").status_code == 200
        (tmp_path / "go").touch()
        [t.join() for t in threads]
        assert [r.json()["results"][0]["ok"] for r in accepted] == [True] * 3
        assert process.wait(PATIENCE_S) == 0


def test_an_idle_service_ends_at_once():
    with fake_service("--drain-s", "3600") as (process, url):
        wait_ready(url)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0  # long before the limit for accepted work


def test_accepted_work_may_not_hold_the_end_for_ever():
    with fake_service("--drain-s", "0.3", batch_s=3600) as (process, url):
        wait_ready(url)
        with _request_in_model(url) as answers:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 1  # work was lost
        _check_shut_down(answers[0])


def test_a_second_signal_ends_without_waiting():
    with fake_service(batch_s=3600) as (process, url):
        wait_ready(url)
        with _request_in_model(url) as answers:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 1
        _check_shut_down(answers[0])


@pytest.mark.parametrize("name", [pytest.param("metricx", marks=pytest.mark.slow), "xcomet"])
def test_a_model_that_computes_for_clients_that_have_left_does_not_abort_the_end(name):
    """Check a thread that returns from torch at exit: the interpreter would call C++'s
    terminate."""
    port = free_port()
    model = str(ROOT / "demo/models" / name)
    process = forked.Popen(
        [
            sys.executable,
            "-m",
            f"services.{name}",
            "--model",
            model,
            "--port",
            str(port),
            "--cache",
            "memory",
            "--threads",
            "1",
            "--max-batch-tokens",
            "8192",
        ],
        cwd=ROOT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url)
        leave_work_behind(url, count=1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_batch_that_hangs_is_left_behind():
    with fake_service(batch_s=600) as (process, url):
        wait_ready(url)
        leave_work_behind(url)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0  # no accepted request was open
    (line,) = [line for line in stderr.splitlines() if "threads_left_behind" in line]
    assert json.loads(line)["threads"] == ["model"]


def test_a_signal_while_threads_are_waited_for_ends_at_once():
    with fake_service(batch_s=600) as (process, url):
        wait_ready(url)
        leave_work_behind(url)
        process.send_signal(signal.SIGTERM)
        lines = iter(process.stderr.readline, "")
        assert any("Waiting for application shutdown" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "threads_left_behind" not in process.stderr.read()


@contextlib.contextmanager
def _request_in_model(url):
    """Hold a request in the model during the block, and return the list that gets its answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(url, 1, timeout=PATIENCE_S)))
    thread.start()
    wait_until(lambda: "scorekit_queue_items 1.0" in httpx.get(f"{url}/metrics").text)
    yield answers
    thread.join()


def _check_shut_down(answer):
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "the service is shutting down"


def test_a_half_sent_request_does_not_hold_the_end():
    with fake_service() as (process, url):
        wait_ready(url)
        head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with connect(url) as in_head, connect(url) as in_body, connect(url):
            in_head.sendall(head)
            in_body.sendall(head + b"Content-Length: 999\r\n\r\n{")
            # The service's loop takes connections in order, so it has accepted the others by now.
            assert httpx.get(f"{url}/health/live").status_code == 200
            process.send_signal(signal.SIGTERM)
            for connection in (in_head, in_body):
                assert connection.recv(65536).startswith(b"HTTP/1.1 503")
            assert process.wait(PATIENCE_S) == 0


def test_an_open_stream_is_sent_to_its_end():
    with fake_service("--max-batch-tokens", "16", batch_s=0.3) as (process, url):
        wait_ready(url)
        samples = [{"src": f"{i} b c d e f g", "mt": "m n o p q r s t"} for i in range(5)]
        with httpx.stream("POST", f"{url}/v1/score/stream", json={"samples": samples}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last) == {"done": True, "ok": 5, "failed": 0}
        assert process.wait(PATIENCE_S) == 0


def _body_of(answer):
    """Return the body of an answer as sent, joined from its chunks."""
    wire = SimpleNamespace(makefile=lambda _: io.BytesIO(answer))
    response = http.client.HTTPResponse(wire)
    response.begin()
    return response.read()


def test_a_slow_reader_gets_all_of_an_answer_that_was_due():
    samples = [{"id": f"{i}".ljust(1200), "src": f"{i}", "mt": "m"} for i in range(10_000)]
    body = json.dumps({"samples": samples}).encode()
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with fake_service() as (process, url):
        wait_ready(url)
        with connect(url) as reader:
            reader.sendall(head + body)
            answer = reader.recv(1000)  # the answer has started; most of it waits in the service
            process.send_signal(signal.SIGTERM)
            time.sleep(2.0)
            while part := reader.recv(2**20):
                answer += part
        body = _body_of(answer)
        assert len(body) > 10_000 * 1200  # more than the kernel buffers
        assert len(json.loads(body)["results"]) == 10_000
        assert process.wait(PATIENCE_S) == 0


def test_sigterm_while_the_model_loads_ends_the_process(tmp_path):
    with fake_service(loads_when=tmp_path / "never") as (process, url):
        wait_until(lambda: is_up(url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
