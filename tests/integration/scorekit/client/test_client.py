"""Test the client against real servers, good and bad."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import time

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from scorekit.client import RemoteScorer, ScoringClient, SyncScoringClient
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.schemas import TranslationSample
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import Secrets, ServiceSettings
from testing.servers import (
    PATIENCE_S,
    Held,
    free_port,
    running_app,
    running_service,
    wait_ready,
    wait_until,
)
from tests.kits import forked

SAMPLES = [{"src": f"s{i}", "mt": f"번역 {i}"} for i in range(100)]


def _right(results, samples=SAMPLES):
    return [r.score for r in results] == [
        fake_score(TranslationSample(**sample), 25.0) for sample in samples
    ]


def test_a_long_list_is_cut_to_the_service_s_limits_and_keeps_its_order():
    backend = FakeBackend()
    with running_service(backend, max_samples=7, max_body_bytes=2048) as url:
        with SyncScoringClient(url) as client:
            assert _right(client.score(SAMPLES))
            long = [{"src": "x" * 500, "mt": str(i)} for i in range(9)]
            assert _right(client.score(long), long)


def test_nothing_to_score_asks_nothing():
    with SyncScoringClient(f"http://127.0.0.1:{free_port()}") as client:
        assert client.score([]) == []


class Flaky:
    """Forward to a service, but answer every other request to /v1/score with `status`."""

    def __init__(self, app, status):
        self.app, self.status, self.num_requests, self.refused = app, status, 0, 0

    async def __call__(self, scope, receive, send):
        if scope.get("path") == "/v1/score":
            self.num_requests += 1
            if self.num_requests % 2:
                self.refused += 1
                headers = [(b"retry-after", b"0")]
                if self.status == "cut":  # an answer that breaks off
                    headers = [(b"content-length", b"9999")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await send({"type": "http.response.body", "body": b"{", "more_body": True})
                    return
                await send(
                    {"type": "http.response.start", "status": self.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": b"<html>from a proxy</html>"})
                return
        await self.app(scope, receive, send)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, "cut"])
def test_passing_troubles_are_asked_again(status):
    flaky = Flaky(create_app(FakeBackend(), ServiceSettings(cache="memory")), status)
    with running_app(flaky) as url:
        # One at a time: the second attempt for a sample always gets an answer.
        with SyncScoringClient(url, batch_size=10, max_in_flight=1) as client:
            assert _right(client.score(SAMPLES))
        assert flaky.refused >= 5


def test_retry_after_is_honoured():
    request_times = []
    app = FastAPI()

    @app.get("/v1/info")
    def info(request: Request):
        request_times.append(time.monotonic())
        if len(request_times) == 3:
            return Response(status_code=401)  # which is not retried
        return Response(status_code=503, headers={"Retry-After": "1"})

    with running_app(app) as url, SyncScoringClient(url, deadline_s=PATIENCE_S) as client:
        with pytest.raises(RequestError, match="no key was sent"):
            client.score(SAMPLES)
    assert all(later - sooner >= 1.0 for sooner, later in itertools.pairwise(request_times))
    assert len(request_times) == 3


def test_a_mistake_of_ours_is_not_asked_again():
    backend = FakeBackend()
    with running_service(backend) as url, SyncScoringClient(url) as client:
        with pytest.raises(
            RequestError, match="options: 'speed' is not a known field"
        ) as error_info:
            client.score(SAMPLES, options={"speed": "fast"}, batch_size=10)
        assert error_info.value.status == 422 and error_info.value.request_id


def test_a_service_that_is_not_there_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    with SyncScoringClient(url, deadline_s=0.5) as client:
        with pytest.raises(ServiceUnreachable, match=url):
            client.score(SAMPLES)
        with pytest.raises(ServiceUnreachable, match=url):
            client.info()


def test_something_else_at_the_url_is_named():
    app = FastAPI()
    with running_app(app) as url, SyncScoringClient(url, deadline_s=0.3) as client:
        with pytest.raises(ServiceUnreachable, match="not a scoring service"):
            client.info()


def test_a_dead_url_rests_while_the_other_answers():
    with running_service(FakeBackend()) as url:
        dead = f"http://127.0.0.1:{free_port()}"
        with SyncScoringClient([dead, url], batch_size=5) as client:
            assert _right(client.score(SAMPLES))


def test_work_is_spread_over_urls():
    first, second = FakeBackend(seconds_per_batch=0.02), FakeBackend(seconds_per_batch=0.02)
    with running_service(first) as a, running_service(second) as b:
        with SyncScoringClient([a, b], batch_size=5) as client:
            assert _right(client.score(SAMPLES))
    assert min(sum(first.batches), sum(second.batches)) >= 20


def test_scores_of_two_services_are_never_mixed():
    with (
        running_service(FakeBackend("metricx")) as first_url,
        running_service(FakeBackend("xcomet")) as second_url,
        SyncScoringClient([first_url, second_url], batch_size=5) as client,
    ):
        with pytest.raises(UserError, match=r"has service 'metricx', http.* has 'xcomet'"):
            client.score(SAMPLES)


def test_text_that_is_not_unicode_fails_alone():
    with running_service(FakeBackend()) as url, SyncScoringClient(url) as client:
        surrogate = {"id": "x", "src": "a\ud800", "mt": "b"}
        good, bad, repeated = client.score([SAMPLES[0], surrogate, SAMPLES[0]])
    assert good.ok and repeated.ok
    assert not bad.ok and bad.error.type == "invalid_input" and bad.id == "x"


def test_a_sample_too_large_for_the_service_fails_alone():
    with running_service(FakeBackend(), max_body_bytes=4096) as url:
        with SyncScoringClient(url) as client:
            good, bad, repeated = client.score(
                [SAMPLES[0], {"src": "a" * 6000, "mt": "b"}, SAMPLES[0]]
            )
    assert good.ok and repeated.ok
    assert not bad.ok and bad.error.type == "invalid_input" and "3072" in bad.error.message


@pytest.mark.parametrize("url", ["localhost:8001", "htp://x", "http://", "", "http://[::1"])
def test_what_is_no_url_is_refused_at_once(url):
    with pytest.raises(UserError, match="is not the URL of a service"):
        SyncScoringClient(url)


def test_an_answer_of_another_shape_is_named_and_not_asked_again():
    requests = []
    app = FastAPI()

    @app.get("/v1/info")
    def info():
        requests.append(1)
        return {"hello": "SECRET"}

    with running_app(app) as url, SyncScoringClient(url) as client:
        with pytest.raises(ServiceUnreachable, match="an answer of another shape") as error_info:
            client.score(SAMPLES)
    assert len(requests) == 1 and "SECRET" not in str(error_info.value)


def test_fields_that_a_newer_service_adds_are_ignored():
    service = create_app(FakeBackend(), ServiceSettings(cache="memory"))

    async def newer(scope, receive, send):
        async def send_more(message):
            if scope.get("path") == "/v1/score" and message["type"] == "http.response.body":
                message["body"] = message["body"].replace(b'"ok":true', b'"queue":1,"ok":true')
            elif message["type"] == "http.response.start" and scope.get("path") == "/v1/score":
                names = (b"content-length",)
                message["headers"] = [h for h in message["headers"] if h[0] not in names]
            await send(message)

        await service(scope, receive, send_more)

    with running_app(newer) as url, SyncScoringClient(url) as client:
        assert _right(client.score(SAMPLES))


def test_waiting_for_a_slot_does_not_count_against_the_deadline():
    """Check many requests with one slot: a transient error late in a long job is still retried."""
    flaky = Flaky(
        create_app(FakeBackend(seconds_per_batch=0.5), ServiceSettings(cache="memory")), 503
    )
    with running_app(flaky) as url:
        wait_ready(url)
        with SyncScoringClient(url, batch_size=10, max_in_flight=1, deadline_s=4.0) as client:
            assert _right(client.score(SAMPLES))
    assert flaky.refused >= 10


def test_a_closed_client_says_so_and_closing_twice_does_nothing():
    with running_service(FakeBackend()) as url:
        with SyncScoringClient(url) as client:
            client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.score(SAMPLES)


def test_who_gives_up_while_it_fails_is_not_shown_the_failure(caplog):
    """Check a call that is cancelled while it fails: its error is not reported."""
    reached = threading.Event()

    async def failing():
        reached.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            raise ServiceUnreachable("http://x", "gone")

    with SyncScoringClient(f"http://127.0.0.1:{free_port()}") as client:
        future = client.thread.submit(failing())
        assert reached.wait(PATIENCE_S)
        assert future.cancel()
        del future
    gc.collect()
    assert caplog.text == ""


def test_a_key_is_sent():
    from pydantic import SecretStr

    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("k"))) as url:
        with SyncScoringClient(url, api_key="k") as client:
            assert _right(client.score(SAMPLES))
        with SyncScoringClient(url, api_key="wrong") as client, pytest.raises(RequestError) as no:
            client.info()
        assert no.value.type == "unauthorized"


def test_closing_ends_the_calls_that_other_threads_wait_in():
    backend = Held()
    raised = []
    with running_service(backend) as url:
        backend.hold()
        client = SyncScoringClient(url)

        def work():
            try:
                client.score(SAMPLES)
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        wait_until(lambda: "scorekit_queue_items 100.0" in httpx.get(f"{url}/metrics").text)
        client.close()
        thread.join(PATIENCE_S)
        backend.go.set()
    assert raised == ["the client was closed meanwhile"]


def test_the_sync_client_works_inside_a_running_loop_and_from_threads():
    with running_service(FakeBackend()) as url, SyncScoringClient(url) as client:

        async def notebook():
            return client.score(SAMPLES)

        assert _right(asyncio.run(notebook()))
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.score(SAMPLES))) for _ in range(4)
        ]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert all(map(_right, answers)) and len(answers) == 4


FORKED = """
import multiprocessing, os, sys
from scorekit.client import SyncScoringClient

client = SyncScoringClient(sys.argv[1], cache_db=sys.argv[2])
samples = [{"src": f"s{i}", "mt": "m"} for i in range(20)]
mine = [r.score for r in client.score(samples)]

def work(_):
    with client:  # a child that closes it closes its own connections
        return [r.score for r in client.score(samples + [{"src": f"{os.getpid()}", "mt": "m"}])]

with multiprocessing.get_context("fork").Pool(3) as pool:
    for scores in pool.map(work, range(3), chunksize=1):
        assert scores[:20] == mine and len(scores) == 21
if not (child := os.fork()):
    with client:
        pass
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert [r.score for r in client.score(samples + [{"src": "after", "mt": "m"}])][:20] == mine
client.close()
if not (child := os.fork()):
    try:
        client.score(samples)
    except RuntimeError as error:
        os._exit(0 if "closed" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_has_a_client_of_its_own(tmp_path):
    with running_service(FakeBackend()) as url:
        command = [sys.executable, "-c", FORKED, url, str(tmp_path / "scores.sqlite")]
        result = forked.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and not result.stderr, result.stderr


def test_the_remote_scorer_never_turns_a_failure_into_a_score():
    samples = [
        SampleForScoring("a", "good"),
        SampleForScoring("a", "nan"),
        SampleForScoring("a", "b"),
    ]
    with running_service(FakeBackend()) as url:
        scorer = RemoteScorer(url)
        output = scorer.score_batch(samples, ScoringConfig(batch_size=1))
        repeated = scorer.submit_batch(samples).result()
        scorer.close()
    first, failed, last = output.sequence_scores
    assert failed is None and output.metadata[1].error.type == "non_finite"
    assert isinstance(first, float) and isinstance(last, float)
    assert repeated.sequence_scores == output.sequence_scores


def test_cancelled_calls_use_up_no_connections():
    """Check that connections cancelled by httpx while they open do not block the next calls."""

    async def body(url):
        async with ScoringClient(url, max_in_flight=2, deadline_s=PATIENCE_S) as client:
            for i in range(60):
                call = asyncio.create_task(client.score([{"src": f"s {i}", "mt": "m"}]))
                for _ in range(i % 12):  # cancelled at another point each time
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            return await client.score(SAMPLES)

    with running_service(FakeBackend()) as url:
        assert _right(asyncio.run(body(url)))
