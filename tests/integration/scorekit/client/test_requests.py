"""Check what the client sends: each sample once, within the limits, and not after its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections import Counter

import pytest
from pydantic_core import to_json

from scorekit.client import ScoringClient, SyncScoringClient, raise_for_failures
from scorekit.client.replicas import ReplicaPool
from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.servers import free_port, running_app, running_service, wait_ready
from tests.kits.recording import Recorder

SAMPLES = [{"src": f"s{i}", "mt": f"번역 {i}"} for i in range(40)]


def _recorder(backend=None, refuse=None, **settings):
    service = create_app(backend or FakeBackend(), ServiceSettings(cache="memory", **settings))
    return Recorder(service, refuse)


def _score_of(sample):
    fields = {name: sample[name] for name in ("src", "mt", "ref") if name in sample}
    return fake_score(TranslationSample(**fields), 25.0)


def _stream(url, samples, **settings):
    async def run():
        async with ScoringClient(url, **settings) as client:
            return [pair async for pair in client.stream(samples)]

    return asyncio.run(run())


DUPLICATES = [
    {"id": "a", "src": "s", "mt": "m"},
    {"id": "b", "mt": "m", "src": "s", "ref": ""},
    {"src": "s", "mt": "m", "ref": None},
    {"id": "c", "src": "s", "mt": "m", "ref": "r"},
    {"id": "a", "src": "s", "mt": "m "},
    {"id": "d", "src": "s", "mt": "m"},
]


def test_equal_samples_are_sent_once_and_each_gets_its_own_id():
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, batch_size=2) as client:
        results = client.score(DUPLICATES)
    assert [r.id for r in results] == ["a", "b", None, "c", "a", "d"]
    assert [r.score for r in results] == [_score_of(sample) for sample in DUPLICATES]
    assert len(recorder.samples) == 3


def test_a_stream_answers_duplicates_too():
    recorder = _recorder()
    with running_app(recorder) as url:
        got = dict(_stream(url, DUPLICATES))
    assert [got[i].id for i in range(6)] == ["a", "b", None, "c", "a", "d"]
    assert [got[i].score for i in range(6)] == [_score_of(sample) for sample in DUPLICATES]
    assert len(recorder.samples) == 3


def test_a_failed_duplicate_fails_for_each_of_its_owners():
    with running_service(FakeBackend()) as url, SyncScoringClient(url) as client:
        results = client.score([{"id": id, "src": "s", "mt": "nan"} for id in "xy"])
    assert [(r.ok, r.id) for r in results] == [(False, "x"), (False, "y")]


def test_an_id_that_is_no_text_is_the_callers_mistake():
    with running_service(FakeBackend()) as url, SyncScoringClient(url) as client:
        with pytest.raises(UserError, match=r"samples\.1\.id: a string or None, not int"):
            client.score([SAMPLES[0], SAMPLES[1] | {"id": 3}])


def _too_many_characters(limit):
    def refuse(body):
        size = sum(len(s["src"]) + len(s["mt"]) for s in body["samples"])
        return (413, {}) if size > limit else None

    return refuse


BUG = to_json({"error": RequestError("internal", "a bug; see the log").wire()})
LONG = {"id": "long", "src": "s" * 500, "mt": "m"}


def test_what_a_service_finds_too_large_is_sent_in_halves_and_a_single_one_fails_alone():
    recorder = _recorder(refuse=_too_many_characters(60))
    samples = [*SAMPLES, LONG, *SAMPLES[:3]]
    with running_app(recorder) as url, SyncScoringClient(url) as client:
        results = client.score(samples)
    failed = results.pop(40)
    assert (failed.ok, failed.id, failed.error.type) == (False, "long", "invalid_input")
    assert [r.score for r in results] == [_score_of(s) for s in samples if s is not LONG]
    sizes = [len(request["samples"]) for request in recorder.requests]
    assert sizes[:2] == [41, 21] and 1 in sizes  # all, the first half, ...


def test_a_stream_that_is_too_large_is_sent_in_halves():
    recorder = _recorder(refuse=_too_many_characters(60))
    with running_app(recorder) as url:
        got = dict(_stream(url, [*SAMPLES, LONG]))
    assert got[40].id == "long" and got[40].error.type == "invalid_input"
    assert [got[i].score for i in range(40)] == [_score_of(s) for s in SAMPLES]


def test_failures_become_errors_that_name_their_sample():
    with running_service(FakeBackend()) as url, SyncScoringClient(url) as client:
        results = client.score([SAMPLES[0], {"id": "n", "src": "s", "mt": "nan"}])
        with pytest.raises(SampleError, match=r"sample 1 \(n\): non_finite: ") as error_info:
            raise_for_failures(results)
        assert raise_for_failures(results[:1]) == results[:1]
    assert (error_info.value.id, error_info.value.index, error_info.value.type) == (
        "n",
        1,
        "non_finite",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_callers_own_index(stream):
    """Check that it is not the index in a request after splitting and deduplication."""
    samples = [*SAMPLES[:10], *SAMPLES[:10], {"src": "s"}, *SAMPLES[10:]]
    with running_service(FakeBackend()) as url:
        with pytest.raises(RequestError, match=r"samples\.20\.mt: ") as error_info:
            if stream:
                _stream(url, samples, batch_size=4)
            else:
                with SyncScoringClient(url, batch_size=4) as client:
                    client.score(samples)
    assert error_info.value.status == 422 and error_info.value.request_id


class Hesitant(FakeBackend):
    """Fail the first `times` attempts for a text with `later` with a transient error."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.tries = Counter()

    def encode(self, samples, options):
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            self.tries[sample.mt] += 1
            if "later" in sample.mt and self.tries[sample.mt] <= self.times:
                encoded[index] = SampleError("upstream", "not now")
        return encoded


HESITANT = [*SAMPLES[:20], {"id": "l", "src": "s", "mt": "later"}, *SAMPLES[20:]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_failed_for_the_moment_is_asked_again_alone(stream):
    recorder = _recorder(backend := Hesitant(times=2))
    with running_app(recorder) as url:
        if stream:
            got = _stream(url, HESITANT)
            results = [result for _, result in sorted(got, key=lambda pair: pair[0])]
            assert len(got) == len(results) == 41
        else:
            with SyncScoringClient(url) as client:
                results = client.score(HESITANT)
    assert [r.score for r in results] == [_score_of(sample) for sample in HESITANT]
    assert [len(request["samples"]) for request in recorder.requests] == [41, 1, 1]
    assert backend.tries["later"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_until_the_deadline_is_a_typed_failure_beside_the_good_ones(stream, monkeypatch):
    pauses = itertools.chain([0.0, 0.0], itertools.repeat(math.inf))  # no deadline allows it
    monkeypatch.setattr("scorekit.net.retry._backoff", lambda state: next(pauses))
    recorder = _recorder(Hesitant(times=10**6))
    with running_app(recorder) as url:
        wait_ready(url)  # to wait for the model would take one of the pauses
        if stream:
            results = dict(_stream(url, HESITANT))
        else:
            with SyncScoringClient(url) as client:
                results = dict(enumerate(client.score(HESITANT)))
    assert [i for i, r in results.items() if not r.ok] == [20] and len(results) == 41
    assert (results[20].id, results[20].error.type) == ("l", "upstream")
    assert [len(request["samples"]) for request in recorder.requests] == [41, 1, 1]


def test_a_caller_who_asks_again_himself_is_told_at_once():
    recorder = _recorder(Hesitant(times=1))
    with running_app(recorder) as url, SyncScoringClient(url, retry_samples=False) as client:
        results = client.score(HESITANT)
        assert [r.ok for r in results].count(False) == 1 and len(recorder.requests) == 1
        assert client.score(HESITANT[20:21])[0].ok


def test_a_bug_of_the_service_is_not_asked_for_again():
    recorder = _recorder(refuse=lambda body: (500, {}, BUG))
    with running_app(recorder) as url, SyncScoringClient(url) as client:
        with pytest.raises(RequestError, match=r"internal: .*a bug; see the log"):
            client.score(SAMPLES)
    assert len(recorder.requests) == 1


def test_a_retried_request_grants_the_service_only_what_is_left():
    recorder = _recorder(refuse=lambda body: (503, {}) if len(recorder.requests) < 3 else None)
    with running_app(recorder) as url:
        with SyncScoringClient(url, timeout_s=20, deadline_s=20) as client:
            client.score(SAMPLES)
    granted = [request["timeout_s"] for request in recorder.requests]
    assert len(granted) == 3 and granted[0] < 20
    assert all(later < sooner for sooner, later in itertools.pairwise(granted))


def test_a_pause_that_would_end_after_the_deadline_is_not_waited_for():
    recorder = _recorder(refuse=lambda body: (429, {"retry-after": "3000"}))
    with running_app(recorder) as url, SyncScoringClient(url, deadline_s=60) as client:
        with pytest.raises(RequestError) as error_info:
            client.score(SAMPLES)
    assert error_info.value.retry_after == 3000 and len(recorder.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_service_that_never_answers_is_given_up_at_the_deadline(stream):
    """Check that this is before the service's own timeout, also with a trickle of bytes."""
    stop = threading.Event()

    async def hanging(scope, receive, send):
        if "/v1/score" not in scope.get("path", ""):
            return await service(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not stop.is_set():
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.05)

    service = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    with running_app(hanging) as url:
        wait_ready(url)
        try:
            with pytest.raises(ServiceUnreachable, match=r"no answer in [\d.]+ s"):
                if stream:
                    _stream(url, SAMPLES, deadline_s=1.0)
                else:
                    with SyncScoringClient(url, deadline_s=1.0) as client:
                        client.score(SAMPLES)
        finally:
            stop.set()


def test_another_url_is_asked_before_a_retry_after_has_passed():
    draining = _recorder(refuse=lambda body: (503, {"retry-after": "3000"}))
    with running_app(draining) as a, running_service(FakeBackend()) as b:
        with SyncScoringClient([a, b], batch_size=5, deadline_s=60) as client:
            results = client.score(SAMPLES)
    assert draining.requests and [r.score for r in results] == [_score_of(s) for s in SAMPLES]


def test_where_all_urls_failed_the_one_that_rests_longest_is_tried_first():
    """Check that a URL that is down is not tried again and again while the other is back."""

    async def picked():
        endpoints = ReplicaPool(["http://a", "http://b", "http://c"])
        names = []
        for _ in range(6):
            with contextlib.suppress(ServiceUnreachable):
                async with endpoints.pick() as endpoint:
                    names.append(endpoint.url[-1])
                    raise ServiceUnreachable(endpoint.url, "refused")
        return names

    assert asyncio.run(picked()) == ["a", "b", "c", "a", "b", "c"]


def test_progress_is_told_of_every_sample_once():
    counts = []

    async def run(url):
        async with ScoringClient(url, batch_size=3) as client:
            await client.score(
                [*SAMPLES, *SAMPLES, {"src": "\ud800", "mt": ""}], on_progress=counts.append
            )

    with running_service(FakeBackend()) as url:
        asyncio.run(run(url))
    assert sum(counts) == 81 and len(counts) > 10


class OtherRevision(FakeBackend):
    def load(self):
        description = super().load()
        description.revision = "other"
        return description


@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
def test_a_pinned_client_refuses_another_model_before_the_first_sample(options):
    first, second = FakeBackend(), OtherRevision()
    with running_service(first) as a, running_service(second) as b:
        for urls in ([a, b], [b, a]):
            with SyncScoringClient(urls, batch_size=5, pin_model=True) as client:
                with pytest.raises(UserError, match=r"has revision '(fake|other)'"):
                    client.score(SAMPLES[:1], **options)
    assert not first.batches and not second.batches


@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
def test_a_pinned_client_refuses_another_model_that_starts_later(options, monkeypatch):
    monkeypatch.setattr("scorekit.client.replicas._REST_S", 0.0)
    port = free_port()
    with running_service(FakeBackend()) as a:
        with SyncScoringClient([a, f"http://127.0.0.1:{port}"], batch_size=5) as client:
            assert client.score(SAMPLES[:1])[0].ok
            app = create_app(OtherRevision(), ServiceSettings(cache="memory"))
            with running_app(app, port=port) as url:
                wait_ready(url)
                with pytest.raises(ServiceUnreachable, match="it runs fake-metricx other"):
                    client.score(SAMPLES, **options)


def test_each_result_is_given_once_as_soon_as_it_comes():
    """Check results of equal samples, of a sample that is never sent, and of a cache, too."""
    samples = [*SAMPLES[:30], SAMPLES[0], {"src": "\ud800", "mt": "b"}]
    pairs: list = []

    async def run(url):
        async with ScoringClient(url, batch_size=7) as client:
            results = await client.score(samples, on_result=lambda *pair: pairs.append(pair))
        assert [result for _, result in sorted(pairs, key=lambda pair: pair[0])] == results

    with running_service(FakeBackend()) as url:
        asyncio.run(run(url))
    assert sorted(index for index, _ in pairs) == list(range(32)) and not pairs[-1][1].ok


def test_a_service_that_does_not_become_ready_is_named_with_its_reason():
    with SyncScoringClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ServiceUnreachable, match="not ready: All connection attempts failed"):
            client.wait_ready(0.5)
