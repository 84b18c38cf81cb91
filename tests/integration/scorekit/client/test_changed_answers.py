"""Check what the client makes of answers that a proxy or another version has changed."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import math

import httpx
import pytest
from pydantic_core import to_json

from scorekit.adapters.verl import compute_score
from scorekit.client import SyncScoringClient, raise_for_failures
from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError, SampleError, ServiceUnreachable
from scorekit.rewards import CompositeReward
from scorekit.schemas import Failed
from scorekit.server.fake import FakeBackend
from testing.servers import running_app, running_service
from tests.kits.answers import changed_results, changed_service

SAMPLES = [{"src": f"text {index}", "mt": f"translation {index}"} for index in range(3)]
NOISE = "one\r\ntwo \x1b[31mred\x1b[0m \u202eend"


def failing(**error):
    """Return a change of the second sample's result into a failure."""

    def change(result):
        if result.get("index", 1) == 1 or "index" not in result:
            result = {k: v for k, v in result.items() if k in ("id", "index")}
            result |= {"ok": False, "error": {"message": "words", "retryable": False} | error}
        return result

    return changed_results(change)


def scoring(value):
    return changed_results(lambda result: result | {"score": value})


def with_bom(path, body):
    return codecs.BOM_UTF8 + body


@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
def test_a_byte_order_mark_before_an_answer_is_read(options):
    with changed_service(with_bom) as url, SyncScoringClient(url) as client:
        assert all(result.ok for result in client.score(SAMPLES, **options))


def test_a_refusal_after_a_byte_order_mark_is_read():
    with changed_service(with_bom) as url, SyncScoringClient(url) as client:
        with pytest.raises(RequestError, match=r"samples\.0\.mt"):
            client.score([{"src": "a"}])


@pytest.mark.parametrize("path", ["/v1/score", "/v1/score/stream"])
def test_a_service_reads_a_request_after_a_byte_order_mark(path):
    body = codecs.BOM_UTF8 + to_json({"samples": SAMPLES})
    with running_service(FakeBackend()) as url:
        answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and len(answer.text.splitlines()) in (1, 4)


@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
@pytest.mark.parametrize("score", [-1e9, 1e9, -0.001, 25.001, math.nan, math.inf, -math.inf])
def test_a_score_that_the_model_cannot_give_is_a_failed_sample(score, options):
    with changed_service(scoring(score)) as url, SyncScoringClient(url) as client:
        results = client.score(SAMPLES, **options)
    for result in results:
        assert isinstance(result, Failed) and result.error.type == "model_failure"
        assert f"the score {score:g}" in result.error.message and not result.error.retryable
    if math.isfinite(score):
        assert "outside the model's range 0 to 25" in results[0].error.message


@pytest.mark.parametrize("score", [-1e-6, 0.0, 25.0, 25.00001])
def test_a_score_at_the_end_of_the_range_may_be_rounded(score):
    with changed_service(scoring(score)) as url, SyncScoringClient(url) as client:
        assert [result.score for result in client.score(SAMPLES)] == [score] * 3


def test_a_range_without_an_end_has_only_the_other():
    def without_min(path, body):
        if path == "/v1/info":
            info = json.loads(body)
            return to_json(info | {"score_range": {"min": None, "max": 1.0}})
        return scoring(-1e9)(path, body)

    with changed_service(without_min, FakeBackend("xcomet")) as url:
        with SyncScoringClient(url) as client:
            assert client.score(SAMPLES)[0].score == -1e9


def test_scores_of_an_older_cache_are_checked(tmp_path):
    cache = tmp_path / "scores.db"
    with running_service(FakeBackend()) as url:
        with SyncScoringClient(url, cache_db=cache) as client:
            first = client.score(SAMPLES)
            info = client.limits()
        narrow = info.score_range.model_copy(update={"max": min(r.score for r in first) - 0.5})
        with SyncScoringClient(url, cache_db=cache) as client:
            assert all(result.cached for result in client.score(SAMPLES))
            client._client._info = info.model_copy(update={"score_range": narrow})
            second = client.score(SAMPLES)
    assert {result.error.type for result in second} == {"model_failure"}


def composite(url):
    async def work():
        component = {"service": [url], "scale": -1.0}
        async with CompositeReward({"components": {"metricx": component}}) as reward:
            return await reward.score(SAMPLES[:1])

    return asyncio.run(work())[0]


def test_no_reward_is_made_of_a_score_outside_the_range():
    with changed_service(scoring(-1e9)) as url:
        result = composite(url)
    assert result.reward is None
    assert result.components["metricx"].status == "model_failure"
    assert "outside the model's range 0 to 25" in result.reason


def verl(url):
    return asyncio.run(
        compute_score(
            "d", "translation", "", {"src": "text"}, url=url, src_key="src", reward_manager="naive"
        )
    )


def test_verl_gets_a_failed_sample_for_a_score_outside_the_range():
    with changed_service(scoring(-1e9)) as url:
        with pytest.raises(SampleError, match="outside the model's range") as error_info:
            verl(url)
    assert error_info.value.type == "model_failure"


def test_an_error_type_of_a_newer_service_is_a_failed_sample_with_its_text():
    with changed_service(failing(type="quota_spent", message="no budget")) as url:
        with SyncScoringClient(url) as client:
            results = client.score(SAMPLES)
            with pytest.raises(SampleError, match="quota_spent: no budget") as error_info:
                raise_for_failures(results)
        with pytest.raises(SampleError, match="quota_spent: no budget"):
            verl(url)
    assert error_info.value.type == "upstream" and error_info.value.index == 0


@pytest.mark.parametrize("options", [{}, {"on_result": lambda *_: None}], ids=["whole", "streamed"])
def test_the_words_of_a_failed_sample_are_one_printable_line(options):
    with changed_service(failing(type="upstream", message=NOISE + "a" * 9000)) as url:
        with SyncScoringClient(url, retry_samples=False) as client:
            results = client.score(SAMPLES, **options)
    (message,) = {result.error.message for result in results if not result.ok}
    assert message.startswith("one two \\x1b[31mred\\x1b[0m \\u202eend") and message.isprintable()
    assert len(message) < 2100


def ask_scores(url):
    with SyncScoringClient(url, api_key="sesame-1") as client:
        client.info()


def ask_vectors(url):
    with Embeddings(url, model="m", api_key="sesame-1") as client:
        client.embed(["a"])


@pytest.mark.parametrize("ask", [ask_scores, ask_vectors])
@pytest.mark.parametrize("status", [401, 422, 500, 503])
def test_the_words_of_a_refusal_are_one_line_without_the_key(ask, status, no_second_try, caplog):
    """Check a server that echoes the request: its address with a password, and the key."""
    caplog.set_level(logging.DEBUG)
    words = f"{NOISE} http://me:hidden@other/ and the key sesame-1 " + "a" * 9000
    types = {401: "unauthorized", 422: "invalid_request", 500: "internal", 503: "unavailable"}

    async def refuse(scope, receive, send):
        if scope["type"] == "http":
            error = {"type": types[status], "message": words, "retryable": False}
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": to_json({"error": error})})

    with running_app(refuse) as url:
        with pytest.raises((RequestError, ServiceUnreachable)) as error_info:
            ask(url)
    text = str(error_info.value)
    assert "one two \\x1b[31mred" in text and text.isprintable() and len(text) < 2400
    for secret in ("hidden", "sesame-1"):
        assert secret not in text and secret not in caplog.text
