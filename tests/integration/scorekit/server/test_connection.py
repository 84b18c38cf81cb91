"""Check more connections than a service takes: which are closed, and that health is answered."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from scorekit.server.fake import FakeBackend
from testing.servers import JSON, Held, free_port, running_service, wait_ready, wait_until
from tests.kits import forked

ROOT = Path(__file__).parents[4]
BODY = json.dumps({"samples": [{"src": "Hello.", "mt": "안녕하세요."}]}).encode()
HEAD = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
HEALTH = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT = 6
#: A service that may open 300 files.
LITTLE_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from scorekit.server.fake import FakeBackend
from scorekit.server.run import main
from scorekit.server.settings import ServiceSettings
main(ServiceSettings, lambda settings: FakeBackend())
"""


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=180)


def read_status(connection):
    """Return the status of the next answer, or 0 if the connection is closed without one."""
    with contextlib.suppress(ConnectionResetError):
        head = connection.recv(65536)
        return int(head.split()[1]) if head else 0
    return 0


@pytest.mark.parametrize("sent", [b"", b"GET /health/ready HT", HEAD[:-2]])
def test_the_oldest_that_has_not_sent_its_request_makes_room(sent):
    with (
        running_service(FakeBackend(), max_connections=LIMIT) as url,
        ExitStack() as stack,
    ):
        half_open = [stack.enter_context(connect(url)) for _ in range(LIMIT)]
        for connection in half_open:
            connection.sendall(sent)
        for _ in range(3):
            assert httpx.get(f"{url}/health/ready").status_code == 200
        assert read_status(half_open[0]) == (429 if sent else 0)
        assert httpx.post(f"{url}/v1/score", content=BODY, headers=JSON).status_code == 200


def test_who_rests_between_requests_goes_before_who_is_sending_a_body():
    with running_service(FakeBackend(), max_connections=2) as url, ExitStack() as stack:
        sending, resting = (stack.enter_context(connect(url)) for _ in range(2))
        sending.sendall(HEAD + BODY[:10])
        resting.sendall(HEALTH)
        assert read_status(resting) == 200
        newcomer = stack.enter_context(connect(url))
        newcomer.sendall(HEALTH)
        assert read_status(newcomer) == 200
        assert read_status(resting) == 0
        sending.sendall(BODY[10:])
        assert read_status(sending) == 200


def test_where_all_wait_for_an_answer_only_health_is_taken():
    backend = Held()
    with running_service(backend, max_connections=2) as url, ExitStack() as stack:
        backend.hold()
        working = [stack.enter_context(connect(url)) for _ in range(2)]
        for connection in working:
            connection.sendall(HEAD + BODY)
        wait_until(backend.entered.is_set)
        wait_until(lambda: httpx.get(f"{url}/health/live").status_code == 200)
        more = stack.enter_context(connect(url))
        more.sendall(HEAD + BODY)
        assert read_status(more) == 429
        health = stack.enter_context(connect(url))
        health.sendall(HEALTH)
        assert read_status(health) == 200
        backend.go.set()
        assert [read_status(connection) for connection in working] == [200, 200]


def test_a_pipelined_request_does_not_make_an_unanswered_one_closable():
    backend = Held()
    with running_service(backend, max_connections=1) as url, ExitStack() as stack:
        backend.hold()
        working = stack.enter_context(connect(url))
        working.sendall(HEAD + BODY + HEAD[:20])
        wait_until(backend.entered.is_set)
        assert httpx.get(f"{url}/health/live").status_code == 200
        backend.go.set()
        assert read_status(working) == 200


@pytest.mark.parametrize("more", [HEAD[:-2], HEAD + BODY[:10]])
def test_a_half_request_behind_an_answered_one_makes_room(more):
    """Send both parts at once, so that the second begins before the first is answered."""
    with running_service(FakeBackend(), max_connections=2) as url, ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(connect(url))
            connection.sendall(HEALTH + more)
            assert read_status(connection) == 200
        assert httpx.post(f"{url}/v1/score", content=BODY, headers=JSON).status_code == 200


def test_closed_connections_are_forgotten():
    with running_service(FakeBackend(), max_connections=2) as url:
        for _ in range(20):
            with connect(url) as connection:
                connection.sendall(HEALTH)
                assert read_status(connection) == 200
        threads = [threading.Thread(target=httpx.get, args=(f"{url}/v1/info",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert httpx.get(f"{url}/v1/info").status_code == 200


def test_six_hundred_half_open_requests_do_not_hide_health_where_files_are_few():
    port = free_port()
    process = forked.Popen(
        [sys.executable, "-c", LITTLE_ROOM, "--port", str(port), "--cache", "memory"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url)
        with ExitStack() as stack:
            for i in range(600):
                connection = stack.enter_context(connect(url))
                with contextlib.suppress(OSError):
                    connection.sendall(HEAD + BODY[:10] if i % 2 else HEAD[:-2])
                if i % 60 == 59:
                    assert httpx.get(f"{url}/health/ready").status_code == 200
    finally:
        process.kill()
        process.wait()
