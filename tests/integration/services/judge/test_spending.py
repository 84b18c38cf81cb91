"""Check that the judge counts all that it has paid for, and that its upstream stays hidden."""

from __future__ import annotations

import json

import httpx
import pytest

from testing.judge import GOOD, PASS, judge, running_judge, saying
from testing.openai_server import FakeOpenAI
from testing.servers import free_port
from tests.integration.services.judge.mqm.careless import PAIR

ERRORS = json.dumps({"errors": []})


def upstream_counters(url, start="scorekit_upstream"):
    """Return the upstream's counters by name and labels, without those that are 0."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith(start))
    return {
        name.removeprefix(f"{start}_"): float(value)
        for name, value in samples
        if "_created" not in name and float(value)
    }


def words(fake):
    """Count the tokens of all prompts as the stand-in does."""
    sent = (message["content"] for request in fake.requests for message in request.body["messages"])
    return sum(len(content.split()) for content in sent)


def test_an_answer_that_is_no_verdict_is_counted_on_the_failed_sample_and_in_metrics():
    fake = saying("no JSON at all")
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD)
        assert result["error"]["type"] == "model_failure" and result["upstream_calls"] == 2
        assert result["usage"] == {"prompt_tokens": words(fake), "completion_tokens": 8}
        assert upstream_counters(url) == {
            'answers_total{counted="yes",model="teacher"}': 2,
            'tokens_total{kind="prompt",model="teacher"}': words(fake),
            'tokens_total{kind="completion",model="teacher"}': 8,
        }


def test_of_votes_of_which_one_failed_the_others_are_counted():
    fake = FakeOpenAI(respond=lambda body, seed: "nonsense" if seed == 2 else ERRORS)
    fake.hang = lambda body: body["seed"] == 2 and fake.choices_served < 2
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, PAIR, votes=3)
        assert result["error"]["message"].startswith("answer 3 of 3: ")
        assert result["upstream_calls"] == 4  # the failing one was sent twice
        assert result["usage"] == {"prompt_tokens": words(fake), "completion_tokens": 6}


@pytest.mark.parametrize("text", [json.dumps(PASS), "no JSON"])
def test_what_an_upstream_does_not_count_is_unknown_and_never_0(text):
    fake = saying(text)
    fake.counts_tokens = False
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD)
        calls = 1 if result["ok"] else 2
        assert result.get("usage") is None and result["upstream_calls"] == calls
        assert upstream_counters(url) == {'answers_total{counted="no",model="teacher"}': calls}


def test_what_costs_nothing_says_so():
    with running_judge(upstream=f"http://127.0.0.1:{free_port()}/v1") as url:
        failed, unasked = judge(url, GOOD), judge(url, PAIR | {"mt": " "})
        assert all("upstream_calls" not in result for result in (*failed, *unasked))
        assert upstream_counters(url) == {}


def test_models_that_only_a_caller_names_share_one_label():
    fake = FakeOpenAI(model="theirs", respond=lambda body, seed: json.dumps(PASS))
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        assert judge(url, GOOD, model="theirs")[0]["ok"]
        assert set(upstream_counters(url, "scorekit_upstream_answers")) == {
            'total{counted="yes",model="other"}'
        }


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 429, 500, "close", "not_json"])
def test_a_caller_sees_neither_the_upstream_s_address_nor_its_words_and_the_log_has_them(
    status, capfd
):
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        fake.fail(status, message="secret words of the upstream")
        answer = httpx.post(f"{url}/v1/score", json={"samples": [GOOD]}).text
        host = upstream.removeprefix("http://").removesuffix("/v1")
        assert "secret" not in answer and host not in answer and "127.0.0.1" not in answer
        name = fake.requests[0].id
        assert name in json.loads(answer)["results"][0]["error"]["message"]
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "upstream_failed" in line]
    assert name in line and host in line
    assert ("secret words" in line) is (status in (400, 402, 429, 500))


def test_a_caller_sees_no_word_of_an_answer_that_is_no_verdict():
    fake = saying(PASS | {"pass": "secret words"})
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD)
        assert result["error"]["type"] == "model_failure" and "secret" not in str(result)


def test_one_attempt_gets_half_of_the_caller_s_time_so_that_a_hung_one_is_asked_again():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream, api="gemini") as url:
        for timeout_s in (90, 600, 1):
            body = {"samples": [GOOD | {"candidate": f"집 {timeout_s}"}], "timeout_s": timeout_s}
            assert httpx.post(f"{url}/v1/score", json=body).status_code == 200
        granted = [float(r.headers["x-stainless-read-timeout"]) for r in fake.requests]
        assert granted == [45, 120, 10]


def test_a_hung_upstream_costs_one_retry_within_the_caller_s_time(monkeypatch):
    monkeypatch.setattr("services.judge.model._MIN_DEADLINE_S", 0.2)
    fake = saying(PASS)
    fake.hang = lambda body: len(fake.requests) == 1
    settings = {"api": "openai", "max_attempts": 3, "request_timeout_s": 0.3}
    with fake.running() as upstream, running_judge(upstream=upstream, **settings) as url:
        assert judge(url, GOOD)[0]["ok"] and len(fake.requests) == 2


@pytest.mark.parametrize("quote", ["", " \n", "\u200b\ufeff"])
def test_a_blank_quote_is_a_malformed_answer_and_costs_no_points(quote):
    mark = {"quote": quote, "context": "", "category": "style", "severity": "major"}
    answers = [json.dumps({"errors": [mark]}), ERRORS]
    fake = FakeOpenAI(respond=lambda body, seed: answers[min(len(fake.requests), 2) - 1])
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, PAIR)
        assert (result["ok"], result["score"], result["upstream_calls"]) == (True, 0.0, 2)
        answers[1] = answers[0]
        (result,) = judge(url, PAIR | {"src": "Another house."})
        assert result["error"]["type"] == "model_failure" and "score" not in result
