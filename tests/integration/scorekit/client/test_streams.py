"""Test streams of the client: interrupted, ended too early, with unusual line ends."""

from __future__ import annotations

import asyncio

from scorekit.client import ScoringClient
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, running_service, wait_ready

SAMPLES = [{"src": f"s{i}", "mt": f"번역 {i}"} for i in range(100)]


def _right(results, samples=SAMPLES):
    return [r.score for r in results] == [
        fake_score(TranslationSample(**sample), 25.0) for sample in samples
    ]


def test_a_stream_gives_results_as_they_come():
    async def run(url):
        async with ScoringClient(url, batch_size=30) as client:
            got = {i: r async for i, r in client.stream([*SAMPLES, {"src": "a\0", "mt": "b"}])}
        assert _right([got[i] for i in range(100)])
        assert not got[100].ok

    with running_service(FakeBackend()) as url:
        asyncio.run(run(url))


def test_a_stream_that_breaks_off_is_asked_again_for_what_is_missing():
    service = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    requests = []

    async def cutting(scope, receive, send):
        if scope.get("path") != "/v1/score/stream":
            return await service(scope, receive, send)
        requests.append(1)
        lines = 0

        async def send_some(message):
            nonlocal lines
            lines += message.get("body", b"").count(b"\n")
            if len(requests) == 1 and lines > 40:
                raise OSError("the line is cut")
            await send(message)

        await service(scope, receive, send_some)

    async def run(url):
        async with ScoringClient(url) as client:
            pairs = [pair async for pair in client.stream(SAMPLES)]
        assert sorted(i for i, _ in pairs) == list(range(100))
        assert _right([r for _, r in sorted(pairs, key=lambda p: p[0])])

    with running_app(cutting) as url:
        asyncio.run(run(url))
    assert len(requests) > 1


def test_a_stream_s_lines_end_at_line_feeds_only():
    class Marks(FakeBackend):
        def _outcome(self, sample):
            span = {"start": 0, "end": len(sample.mt), "severity": "MINOR", "confidence": 0.5}
            return {"score": 0.5, "error_spans": [span | {"text": sample.mt}]}

    mt = "one\u2028two\x85three\x1cfour"
    with running_service(Marks("xcomet")) as url:
        ((_, result),) = asyncio.run(_streamed(url, [{"src": "s", "mt": mt}]))
    assert result.error_spans[0].text == mt


async def _streamed(url, samples, **settings):
    async with ScoringClient(url, **settings) as client:
        return [pair async for pair in client.stream(samples)]


def test_a_stream_that_ends_too_early_is_asked_again_for_what_is_missing():
    requests = []

    class Forgetful:
        """End once before the last results, with a final line as if complete."""

        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            if scope.get("path") != "/v1/score/stream" or requests:
                await self.app(scope, receive, send)
                return
            requests.append(scope)

            async def send_some(message):
                if message["type"] == "http.response.body" and b'"index":1,' in message["body"]:
                    message = {**message, "body": b""}
                await send(message)

            await self.app(scope, receive, send_some)

    app = Forgetful(create_app(FakeBackend(), ServiceSettings(cache="memory")))
    with running_app(app) as url:
        wait_ready(url)
        result_by_index = dict(asyncio.run(_streamed(url, SAMPLES[:4])))
    assert requests and _right([result_by_index[k] for k in range(4)], SAMPLES[:4])
