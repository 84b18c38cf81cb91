"""Test how the reward servers for other trainers hold memory, drain, and end with a broken log."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from scorekit.adapters.http import create_routes
from scorekit.server import bridge
from scorekit.server.fake import FakeBackend
from testing.servers import (
    JSON,
    PATIENCE_S,
    Held,
    free_port,
    running_app,
    running_service,
    wait_until,
)
from tests.kits import forked
from tests.kits.server_kinds import RawClient, head
from tests.kits.unwritable import BY_NAME

ROOT = Path(__file__).parents[4]
#: Runs a module. For a log that is not read: each line waits for the reader until it gives up.
RUN = """
import runpy, sys
import scorekit.streams as s
s.MAX_WAIT_S = s.END_WAIT_S = 0.0
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
BODIES = {
    "openrlhf": ("/get_reward", {"query": ["a: b"], "prompts": ["a:"], "labels": ["a"]}),
    "gemmax": ("/score", {"items": [{"src": "a", "mt": "b"}]}),
}


@contextlib.contextmanager
def running_bridge(
    name: str, service: str, stderr: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start an adapter's command before a service; yield the process and its URL."""
    port = free_port()
    option = "--url" if name == "openrlhf" else "--qe"
    command = [sys.executable, "-c", RUN, f"scorekit.adapters.{name}", option, service]
    process = forked.Popen(
        [*command, "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _is_up(url))
        yield process, url
    finally:
        process.kill()
        process.wait()


def _is_up(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running_service(FakeBackend("xcomet")) as url:
        yield url


@pytest.mark.parametrize("unwritable", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize(
    ("name", "number"), [("openrlhf", signal.SIGTERM), ("gemmax", signal.SIGINT)]
)
def test_a_log_that_cannot_be_written_does_not_keep_a_bridge(service, name, number, unwritable):
    with (
        unwritable() as stderr,
        running_bridge(name, service, stderr) as (process, url),
    ):
        path, body = BODIES[name]
        assert httpx.post(url + path, json=body).status_code == 200
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("name", BODIES)
def test_an_accepted_request_is_answered_before_the_end_and_a_new_one_refused(name):
    path, body = BODIES[name]
    backend = Held("xcomet")
    with (
        running_service(backend) as service,
        running_bridge(name, service) as (process, url),
        RawClient(url) as late,
        ThreadPoolExecutor() as threads,
    ):
        backend.hold()
        accepted = threads.submit(httpx.post, url + path, json=body, timeout=PATIENCE_S)
        wait_until(backend.entered.is_set)
        late.send(head("GET", "/health"))
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: _status_of(url, path, body) == 503)
        backend.go.set()
        assert accepted.result().status_code == 200
        assert process.wait(PATIENCE_S) == 0


def _status_of(url: str, path: str, body: object) -> int:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(url + path, json=body).status_code
    return 0


def test_bodies_in_work_share_one_budget(monkeypatch):
    monkeypatch.setattr(bridge, "MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr(bridge, "MAX_INFLIGHT_BYTES", 4 * 2**20)
    content = b'"%b"' % (b"a" * (2**20 - 100))
    may_end = threading.Event()

    async def answer(body: bytes) -> int:
        await asyncio.to_thread(may_end.wait, PATIENCE_S)
        return len(body)

    access = bridge.bridge_access("127.0.0.1", "")
    app = create_routes({"/score": answer}, {"/health": lambda: {"live": True}}, access)
    statuses: list[int] = []

    def post(url: str) -> None:
        response = httpx.post(f"{url}/score", content=content, headers=JSON, timeout=PATIENCE_S)
        statuses.append(response.status_code)

    with running_app(app) as url, ThreadPoolExecutor(12) as threads:
        sent = [threads.submit(post, url) for _ in range(12)]
        wait_until(lambda: len(statuses) >= 8)
        assert set(statuses) == {429}  # the others hold all of it
        may_end.set()
        for request in sent:
            request.result()
        assert 1 <= statuses.count(200) <= 4 and set(statuses) == {200, 429}
        assert httpx.post(f"{url}/score", json={}).status_code == 200


def test_a_bug_is_a_typed_500_and_no_text_of_it():
    async def fail(body: bytes) -> None:
        raise RuntimeError("a SECRET text")

    access = bridge.bridge_access("127.0.0.1", "")
    app = create_routes({"/score": fail}, {"/health": lambda: {"live": True}}, access)
    with running_app(app) as url:
        answer = httpx.post(f"{url}/score", json={})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "internal"
    assert "SECRET" not in answer.text


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_name_of_a_host_is_one_line(service, name):
    option = "--url" if name == "openrlhf" else "--qe"
    command = [sys.executable, "-m", f"scorekit.adapters.{name}", option, service]
    done = forked.run(
        [*command, "--allow-host", "https://trainer"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--allow-host: 'https://trainer' is no host name" in done.stderr
