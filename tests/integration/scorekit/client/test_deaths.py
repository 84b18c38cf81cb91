"""Test a client whose request ends servers: real processes that die and are restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from tenacity import wait_random

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.errors import ServiceUnreachable
from scorekit.net.retry import Deadline
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.servers import free_port, running_app, wait_ready, wait_until
from tests.kits import forked
from tests.kits.recording import Recorder
from tests.kits.restarting_service import DEADLY, HEAVY

FLAGS = ("--cache", "memory")


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch):
    """Shorten the pauses: the number of requests is tested, not the time between them."""
    monkeypatch.setattr("scorekit.net.retry._backoff", wait_random(0.01, 0.1))


class Replica:
    """A service on one port that can die, and is restarted whenever it does."""

    def __init__(self):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.deaths = 0
        self._process = forked.Popen(
            [sys.executable, "-m", "tests.kits.restarting_service", "--port", str(port), *FLAGS],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._count, daemon=True)
        self._reader.start()

    def _count(self):
        for _ in self._process.stdout:
            self.deaths += 1

    def end(self):
        """Stop it and its current process."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        self._process.stdout.close()
        self._process.wait()


@contextlib.contextmanager
def _replicas(count=2):
    replicas = [Replica() for _ in range(count)]
    try:
        for replica in replicas:
            wait_ready(replica.url)
        yield replicas
    finally:
        for replica in replicas:
            replica.end()


def _died(replicas, times):
    """Wait for the count: a death is counted a moment after its client sees it."""
    wait_until(lambda: sum(replica.deaths for replica in replicas) >= times)
    assert sum(replica.deaths for replica in replicas) == times


def _score_of(sample):
    return fake_score(TranslationSample(src=sample["src"], mt=sample["mt"]), 25.0)


def _samples(count):
    return [{"id": f"n{i}", "src": f"s{i}", "mt": f"번역 {i}"} for i in range(count)]


def _streamed(urls, samples, **settings):
    async def run():
        async with ScoringClient(urls, **settings) as client:
            pairs = [pair async for pair in client.stream(samples)]
        assert sorted(index for index, _ in pairs) == list(range(len(samples)))
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_ends_its_server_fails_alone_after_four_deaths(stream):
    samples = _samples(600)
    samples[100]["mt"] += DEADLY
    with _replicas() as replicas:
        urls = [replica.url for replica in replicas]
        if stream:
            results = _streamed(urls, samples)
        else:
            with SyncScoringClient(urls) as client:
                results = client.score(samples)
        _died(replicas, 4)
    failed = results.pop(100)
    assert (failed.id, failed.error.type, failed.error.retryable) == (
        "n100",
        "model_failure",
        False,
    )
    assert "4 times; it is not sent again" in failed.error.message
    assert [r.score for r in results] == [_score_of(s) for i, s in enumerate(samples) if i != 100]


def test_a_sample_asked_for_alone_is_asked_for_four_times():
    """Check with a server that is also killed by hand: one break is no proof."""
    with _replicas(1) as (replica,), SyncScoringClient(replica.url) as client:
        (failed,) = client.score([{"src": "s", "mt": DEADLY}])
        assert failed.error.type == "model_failure"
        (good,) = client.score(_samples(1))
        assert good.ok
        _died([replica], 4)


def test_a_request_that_is_too_much_as_a_whole_is_answered_in_pieces():
    samples = _samples(64)
    for index in (7, 8):  # in one batch of the model, and in two requests
        samples[index]["mt"] += HEAVY
    with _replicas(1) as (replica,), SyncScoringClient(replica.url) as client:
        results = client.score(samples)
        _died([replica], 2)
    assert [r.score for r in results] == [_score_of(sample) for sample in samples]


@contextlib.contextmanager
def _behind_a_proxy():
    """Yield the URL of a proxy, and the requests with the deadly samples.

    The proxy reports in its own words that the replica is down."""

    def refuse(body):
        if not any(sample["mt"] == DEADLY for sample in body["samples"]):
            return None
        deadly.append(body["samples"])
        return 502, {}, b"<html>Bad Gateway</html>"

    deadly: list[list[dict]] = []
    recorder = Recorder(create_app(FakeBackend(), ServiceSettings(cache="memory")), refuse)
    with running_app(recorder) as url:
        wait_ready(url)
        yield url, deadly


def test_a_proxy_s_word_that_its_replica_is_gone_counts_as_well():
    samples = [*_samples(40), {"src": "s", "mt": DEADLY}]
    with _behind_a_proxy() as (url, deadly), SyncScoringClient(url) as client:
        results = client.score(samples)
    assert results[40].error.type == "model_failure"
    assert [r.score for r in results[:40]] == [_score_of(sample) for sample in samples[:40]]
    assert [len(requests) for requests in deadly] == [41, 41, 2, 1]


def test_after_three_deadly_samples_the_rest_of_their_request_is_not_asked():
    samples = [{"src": f"s{i}", "mt": DEADLY} for i in range(10)]
    with _behind_a_proxy() as (url, deadly), SyncScoringClient(url) as client:
        results = client.score(samples)
    assert [r.error.type for r in results] == ["model_failure"] * 3 + ["upstream"] * 7
    assert [len(requests) for requests in deadly] == [10, 10] + 3 * [1, 1]  # twice each alone


def test_a_deadly_sample_is_remembered_for_the_next_call():
    samples = [*_samples(10), {"id": "d", "src": "s", "mt": DEADLY}]
    with _behind_a_proxy() as (url, deadly), SyncScoringClient(url) as client:
        for _ in range(3):  # as a trainer that retries
            results = client.score(samples)
            assert [r.ok for r in results] == [True] * 10 + [False]
            assert (results[10].id, results[10].error.type) == ("d", "model_failure")
        assert len(deadly) == 4
        client.score(samples, {"cache": False})  # another request, with all cached samples
    assert len(deadly) == 8


def test_what_a_deadline_cut_short_is_gone_on_with_by_the_next_call(monkeypatch):
    """Check servers that start slowly: one call may see no more than one death."""
    service = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    deaths, up = [], threading.Event()
    up.set()

    async def dying(scope, receive, send):
        path = scope.get("path")
        if up.is_set() and path == "/v1/score":
            deaths.append(path)
            up.clear()
        if not up.is_set() and path in ("/v1/info", "/v1/score"):
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"Bad Gateway"})
            return
        await service(scope, receive, send)

    with running_app(dying) as url:
        wait_ready(url)
        with SyncScoringClient(url) as client:
            client.limits()
            # The deadline ends while the server is down, on any machine.
            monkeypatch.setattr(Deadline, "remaining_s", lambda self: 600.0 if up.is_set() else 0.0)
            for _ in range(3):
                with pytest.raises(ServiceUnreachable):
                    client.score([{"src": "s", "mt": "m"}])
                up.set()  # it was restarted
            for _ in range(2):
                (failed,) = client.score([{"src": "s", "mt": "m"}])
                assert failed.error.type == "model_failure"
                up.set()
    assert len(deaths) == 4


def test_a_server_that_only_starts_anew_is_waited_for():
    """Check that 502 from a proxy during the start does not count against the sample."""
    service = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    seen = []

    async def starting(scope, receive, send):
        path = scope.get("path", "")
        seen.append(path)
        num_requests = seen.count("/v1/score")
        away = num_requests == 1 and seen.count("/v1/info") < 8  # from the first request on
        if not away or path not in ("/v1/score", "/v1/info"):
            return await service(scope, receive, send)
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": b"Bad Gateway"})

    with running_app(starting) as url:
        wait_ready(url)
        with SyncScoringClient(url) as client:
            (result,) = client.score(_samples(1))
    assert result.ok and seen.count("/v1/score") == 2
