"""Test the judge over HTTP: verdicts by rules and by an LLM, and an LLM that misbehaves."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.errors import UserError
from scorekit.schemas import Failed, JudgeOptions, JudgeSample, JudgeScored, Scored
from scorekit.scorers import reward_output
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import Secrets
from services.judge.model import MAX_CLIENTS, OpenAIBackend
from services.judge.rubrics import load_rubrics
from services.judge.settings import JudgeSettings
from testing.judge import ANSWER, GOOD, PASS, judge, running_judge, saying
from testing.openai_server import FakeOpenAI
from testing.servers import free_port, running_service, wait_until


@pytest.fixture(scope="module")
def rules_url():
    with running_judge() as url:
        yield url


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ("그 집은 빨간색이다.", "ok"),
        ("", "empty"),
        ("번역: 그 집은 빨간색이다.", "meta_phrase"),
        ("assistant: 그 집은 빨간색이다.", "role_token"),
        ("<think>집</think> 그 집은 빨간색이다.", "marker"),
        ("The house is red.", "wrong_script"),
        ("その家は赤いです。", "wrong_script"),
        ("빨간 집, 빨간 집, 빨간 집, 빨간 집, ", "repetition"),
        (
            "그 집은 빨간색이다. 매우 오래전부터 이 마을에서 유명하던 이야기가 있는데, "
            "나는 그것을 어린 시절에 할머니에게서 처음 들었고 그 뒤로 한 번도 잊은 적이 없다. "
            "또한 그 집을 둘러싼 숲과 강과 밭, 계절마다 바뀌는 빛깔까지도 여전히 눈에 선하고, "
            "언젠가 다시 그곳으로 돌아가서 남은 날들을 조용히 보내고 싶다는 생각이 든다.",
            "length",
        ),
    ],
)
def test_rules_say_what_is_wrong(rules_url, candidate, reason):
    (result,) = judge(rules_url, GOOD | {"candidate": candidate})
    assert result["verdict"]["reason_code"] == reason
    assert result["verdict"]["pass"] is (reason == "ok")
    assert result["score"] == float(reason == "ok")


def test_rules_see_copies_and_other_languages_of_one_script(rules_url):
    source = "The committee will meet again next Thursday to discuss the remaining questions."
    wrong = source.replace("Thursday", "Friday afternoon").replace("will meet", "might convene")
    german = GOOD | {"target_lang": "German", "source_text": source}
    copied, english = judge(
        rules_url, german | {"candidate": source}, german | {"candidate": wrong[::1]}
    )
    assert copied["verdict"]["reason_code"] == "copied"
    assert english["verdict"]["reason_code"] == "wrong_language"


def test_rules_call_themselves_rules_and_need_no_llm(rules_url):
    info = httpx.get(f"{rules_url}/v1/info").json()
    assert (info["service"], info["model"]) == ("judge", "rules")
    assert info["score_range"] == {"min": 0.0, "max": 1.0} and info["higher_is_better"]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (GOOD | {"task": "poetry"}, "there are answer_any_of, answer_correctness"),
        ({k: v for k, v in GOOD.items() if k != "candidate"}, "candidate: the rubric wants it"),
        (GOOD | {"extra": "x"}, "unknown text. The rubric has"),
        (GOOD | {"source_lang": "Elbonian"}, "source_lang"),
        (GOOD | {"candidate": "a\0b"}, "NUL"),
    ],
)
def test_a_sample_that_no_rubric_fits_fails_beside_its_siblings(rules_url, sample, words):
    bad, good = judge(rules_url, sample, GOOD)
    assert bad["error"]["type"] == "invalid_input" and words in bad["error"]["message"]
    assert good["ok"]


@pytest.mark.parametrize("sample", [{}, GOOD | {"candidate": 1}, GOOD | {"candidate": None}])
def test_a_sample_of_another_shape_is_refused(rules_url, sample):
    response = httpx.post(f"{rules_url}/v1/score", json={"samples": [sample]})
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "invalid_request"


def test_an_unknown_option_is_refused(rules_url):
    body = {"samples": [GOOD], "options": {"max_input_length": 100}}
    assert httpx.post(f"{rules_url}/v1/score", json=body).status_code == 422


def test_an_llms_verdict_comes_back_with_the_sampling_of_the_rubric():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD | {"id": "x"})
        usage, calls = result.pop("usage"), result.pop("upstream_calls")
        expected = {"id": "x", "ok": True, "cached": False, "score": 1.0, "verdict": PASS}
        assert calls == 1 and result == expected
        assert usage["completion_tokens"] == len(json.dumps(PASS).split())
        assert usage["prompt_tokens"] > 100
        body = fake.requests[0].body
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("teacher", 0.0, 128)
        assert (body["top_p"], body["top_k"], body["seed"]) == (1.0, 0, 0)
        assert body["response_format"]["json_schema"]["schema"]["required"][0] == "pass"
        assert "Source, in English:" in body["messages"][1]["content"]
        assert GOOD["candidate"] in body["messages"][1]["content"]


def test_model_temperature_and_max_tokens_may_come_with_the_request():
    fake = FakeOpenAI("other", respond=lambda body, seed: json.dumps(PASS))
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD, model="other", temperature=0.5, max_tokens=64)
        assert result["ok"]
        body = fake.requests[0].body
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0.5, 64)


def test_how_much_is_thought_is_told_and_makes_it_another_judge():
    fake, revisions = saying(PASS), set()
    with fake.running() as upstream:
        for settings in ({}, {"effort": "low"}, {"effort": "low", "api": "gemini"}):
            with running_judge(upstream=upstream, **settings) as url:
                assert judge(url, GOOD)[0]["ok"]
                assert fake.requests[-1].body.get("reasoning_effort") == settings.get("effort")
                revisions.add(httpx.get(f"{url}/v1/info").json()["revision"])
    assert "seed" not in fake.requests[-1].body and "seed" in fake.requests[0].body
    assert len(revisions) == 2


@pytest.mark.parametrize(("stated_score", "passed"), [(0.5, True), (0.25, False), (1, True)])
def test_an_answer_is_scored_between_0_and_1(stated_score, passed):
    fake = saying({"score": stated_score, "reason_code": "partial", "notes": ""})
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, ANSWER)
        assert result["score"] == stated_score and result["verdict"]["pass"] is passed


def test_long_notes_are_cut():
    fake = saying(PASS | {"notes": "긴 말 " * 200})
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD, max_tokens=4096)
        assert len(result["verdict"]["notes"]) == 300


def test_a_batch_is_asked_at_once():
    fake = saying(PASS)
    with fake.running() as upstream:
        settings = JudgeSettings(backend="openai", base_url=upstream, model="teacher")
        backend = OpenAIBackend(load_rubrics(), settings, None)
        backend.load()
        samples = [JudgeSample(**GOOD | {"candidate": f"후보 {i}"}) for i in range(8)]
        fake.hang = True
        outcomes = []
        batch = backend.encode(samples, JudgeOptions())
        asking = threading.Thread(target=lambda: outcomes.extend(backend.forward(batch)))
        asking.start()
        wait_until(lambda: fake.in_flight == 8)
        fake.hang = False
        asking.join(30)
        assert [outcome["verdict"] for outcome in outcomes] == [PASS] * 8


def test_models_that_callers_named_leave_nothing_behind_but_a_few_clients():
    fake = FakeOpenAI()
    with fake.running() as upstream:
        settings = JudgeSettings(backend="openai", base_url=upstream, model="teacher")
        backend = OpenAIBackend(load_rubrics(None), settings, None)
        backend.load()
        for i in range(40):
            options = JudgeOptions(model=f"no such model {i}")
            (outcome,) = backend.forward(backend.encode([JudgeSample(**GOOD)], options))
            assert outcome.type == "upstream" and not outcome.retryable
        assert len(backend._clients) <= MAX_CLIENTS and not backend._asking


def test_malformed_json_gets_a_second_try():
    answers = iter(["Sure! It passes.", json.dumps(PASS)])
    fake = FakeOpenAI(respond=lambda body, seed: next(answers))
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD)
        assert result["verdict"] == PASS
        first, second = (r.body["messages"] for r in fake.requests)
        assert first[0] == second[0] and second[1]["content"].startswith(first[1]["content"])
        assert fake.requests[0].id != fake.requests[1].id


@pytest.mark.parametrize(
    "answer",
    [
        "It passes.",
        '{"pass": true',
        "true",
        PASS | {"pass": "yes"},
        PASS | {"reason_code": "other"},
        {"pass": True},
    ],
)
def test_malformed_json_twice_is_an_error_and_no_verdict(answer):
    fake = saying(answer)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD)
        assert not result["ok"] and "verdict" not in result
        assert result["error"]["type"] == "model_failure"
        assert "no verdict" in result["error"]["message"]
        assert len(fake.requests) == 2
        assert httpx.get(f"{url}/health/ready").status_code == 200


@pytest.mark.parametrize("stated_score", [7, -0.1, "1", None])
def test_a_score_beside_the_scale_is_an_error(stated_score):
    fake = saying({"score": stated_score, "reason_code": "correct", "notes": ""})
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, ANSWER)
        assert result["error"]["type"] == "model_failure"


def test_cut_json_says_so_and_is_not_asked_for_again():
    fake = saying(PASS)
    fake.cut = True
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        (result,) = judge(url, GOOD, max_tokens=99)
        assert result["error"]["type"] == "model_failure"
        assert "cut at 99 tokens" in result["error"]["message"]
        assert len(fake.requests) == 1


def test_a_missing_upstream_fails_samples_and_not_the_service():
    with running_judge(upstream=f"http://127.0.0.1:{free_port()}/v1") as url:
        results = judge(url, GOOD, ANSWER)
        assert [r["error"]["type"] for r in results] == ["upstream", "upstream"]
        assert all(r["error"]["retryable"] for r in results)
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert judge(url, GOOD)[0]["error"]["type"] == "upstream"


def test_an_upstream_that_comes_back_is_asked_again():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        fake.fail(500, times=None)
        assert judge(url, GOOD)[0]["error"]["type"] == "upstream"
        fake.well()
        assert judge(url, GOOD)[0]["ok"]


def test_attempts_are_repeated_as_often_as_told():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream, max_attempts=2) as url:
        fake.fail(503)
        assert judge(url, GOOD)[0]["ok"]
        assert [r.status for r in fake.requests] == [503, 200]


def test_a_wrong_key_or_model_is_told_a_sample_without_the_key():
    fake = FakeOpenAI(api_key="right")
    with fake.running() as upstream, running_judge(upstream=upstream, key="my-wrong-key") as url:
        (result,) = judge(url, GOOD)
        assert result["error"]["type"] == "upstream" and "key" in result["error"]["message"]
        assert "my-wrong-key" not in result["error"]["message"]
        assert result["error"]["retryable"] is False
    with fake.running() as upstream, running_judge(upstream=upstream, key="right") as url:
        (result,) = judge(url, GOOD, model="nobody")
        assert result["error"]["type"] == "upstream" and "nobody" in result["error"]["message"]
        assert result["error"]["retryable"] is False


def test_what_an_upstream_refuses_for_good_is_not_retryable_and_what_it_fails_for_the_moment_is():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        for status in (400, 403, 404, 429, 500):
            fake.fail(status)
            (result,) = judge(url, GOOD)
            assert result["error"]["type"] == "upstream", status
            assert result["error"]["retryable"] is (status >= 429), status


def test_overlong_texts_fail_before_and_behind_the_service():
    fake = saying(PASS)
    with (
        fake.running() as upstream,
        running_judge(upstream=upstream, max_input_length=100) as url,
    ):
        (result,) = judge(url, GOOD | {"candidate": "집" * 400})
        assert result["error"]["type"] == "overlong" and not fake.requests
        fake.context_length = 10
        assert judge(url, GOOD)[0]["error"]["type"] == "overlong"


def test_start_warm_up_and_readiness_ask_no_llm():
    fake = saying(PASS)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        assert httpx.get(f"{url}/v1/info").json()["model"] == "teacher"
        assert not fake.requests


def test_verdicts_are_cached_under_everything_that_shapes_them(tmp_path):
    fake = FakeOpenAI()  # it answers by a hash of messages, temperature and schema
    cache = f"sqlite:///{tmp_path}/judge.sqlite"
    with fake.running() as upstream:
        with running_judge(upstream=upstream, cache=cache) as url:
            (first,) = judge(url, GOOD)
            (repeated,) = judge(url, GOOD)
            assert repeated == first | {"cached": True} and len(fake.requests) == 1
            for options in ({"temperature": 0.1}, {"max_tokens": 127}, {"model": "teacher"}):
                assert not judge(url, GOOD, **options)[0]["cached"]
            assert not judge(url, GOOD | {"target_lang": "ja"})[0]["cached"]
            assert not judge(url, GOOD | {"candidate": "집"})[0]["cached"]
            assert not judge(url, GOOD, cache=False)[0]["cached"]
        num_requests = len(fake.requests)
        with running_judge(upstream=upstream, cache=cache) as url:
            assert judge(url, GOOD)[0] == first | {"cached": True}
        rubric_path = tmp_path / "own.yaml"
        rubric_path.write_text(OWN)
        with running_judge(upstream=upstream, cache=cache, rubrics=tmp_path) as url:
            assert not judge(url, GOOD)[0]["cached"]
        assert len(fake.requests) == num_requests + 1
    fake.model = "newer"
    with (
        fake.running() as upstream,
        running_judge(upstream=upstream, model="newer", cache=cache) as url,
    ):
        assert not judge(url, GOOD)[0]["cached"]


def test_samples_that_differ_only_in_a_rubrics_variable_are_not_mixed_up():
    def answer(body, seed):
        prompt = body["messages"][1]["content"]
        return json.dumps(PASS | {"notes": next(n for n in ("첫째", "둘째") if n in prompt)})

    fake = FakeOpenAI(respond=answer)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        results = judge(
            url,
            GOOD | {"candidate": "첫째"},
            GOOD | {"candidate": "둘째"},
            GOOD | {"candidate": "첫째"},
        )
        assert [r["verdict"]["notes"] for r in results] == ["첫째", "둘째", "첫째"]
        assert len(fake.requests) == 2


def test_api_keys_metrics_and_streams_are_those_of_every_service():
    with running_judge(secrets=Secrets(api_keys="k")) as url:
        body = {"samples": [GOOD, ANSWER | {"task": "answer_grounded"}]}
        assert httpx.post(f"{url}/v1/score", json=body).status_code == 401
        headers = {"Authorization": "Bearer k"}
        answer = httpx.post(f"{url}/v1/score/stream", json=body, headers=headers)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1] == {"done": True, "ok": 1, "failed": 1}
        metrics = httpx.get(f"{url}/metrics", headers=headers).text
        assert 'scorekit_samples_total{outcome="invalid_input"} 1.0' in metrics


def test_the_client_takes_mappings_and_gives_verdicts(rules_url):
    async def ask():
        async with ScoringClient(rules_url) as client:
            foreign = {"task": "poetry", "candidate": "x"}
            samples = [GOOD | {"id": "g"}, foreign, GOOD | {"candidate": "\ud800"}]
            streamed = {index: result async for index, result in client.stream(samples)}
            return await client.score(samples, {"cache": False}), streamed

    (good, other, lone), streamed = asyncio.run(ask())
    assert isinstance(good, JudgeScored) and good.id == "g" and good.verdict.passed
    assert good.verdict.model_dump() == {"pass": True, "reason_code": "ok", "notes": ""}
    assert isinstance(other, Failed) and isinstance(lone, Failed)
    assert isinstance(streamed[0], JudgeScored)


def test_translations_are_still_scored_and_verdicts_are_no_scores_of_translations(rules_url):
    with running_service(FakeBackend("xcomet")) as url, SyncScoringClient(url) as client:
        (result,) = client.score([{"src": "a", "mt": "b"}])
        assert isinstance(result, Scored)
    with SyncScoringClient(rules_url) as client:
        results = client.score([GOOD])
    with pytest.raises(UserError, match="not scores of translations"):
        reward_output(results)


OWN = """
variables: {text: text}
system: Judge it.
user: "{{ text }}"
schema:
  type: object
  properties: {pass: {type: boolean}, reason_code: {type: string}, notes: {type: string}}
  required: [pass]
"""
