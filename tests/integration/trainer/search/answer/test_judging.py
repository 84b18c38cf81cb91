"""Check verdicts: grounded ones, failures, their cost, and a judge that is replaced."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64decode
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from PIL import Image

from scorekit.errors import UserError
from scorekit.paid.store import judge_of
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import running_app
from tests.kits.trainer.search_answers import answering, episode, image_hash, serving
from trainer.search.answer.config import SEARCH


def png(image: str) -> bytes:
    """Return a real image for a made-up image hash."""
    data = io.BytesIO()
    Image.new("RGB", (32, 32), f"#{image[:6]}").save(data, "PNG")
    return data.getvalue()


def verdicts(body, seed):
    """Give a grounding score of one half; an answer is right if it equals its reference."""
    content = body["messages"][1]["content"]
    if isinstance(content, list):
        return json.dumps({"score": 0.5, "reason_code": "partial", "notes": f"{len(content)}"})
    return json.dumps({"score": 1.0, "reason_code": "correct", "notes": ""})


@pytest.fixture(scope="module")
def served():
    """Yield a generator, the model behind the judge, and a config that names generator and
    judge."""
    judge_llm = FakeOpenAI(respond=verdicts)
    with (
        serving() as (fake, config),
        judge_llm.running() as upstream,
        running_judge(upstream=upstream) as url,
    ):
        yield fake, judge_llm, config | {"judge": {"url": url, "grounded": True, "deadline_s": 5.0}}


@pytest.fixture
def judge_llm(served):
    fake, judge_llm, _ = served
    for server in (fake, judge_llm):
        server.well()
        server.forget()
    judge_llm.respond = verdicts
    return judge_llm


def finish(config, folder, *episodes, **sections):
    async def work():
        pipeline = answering(config, folder, **sections)
        try:
            await pipeline.check()
            done = await asyncio.gather(
                *(pipeline.finish(trajectory, png) for trajectory in episodes)
            )
            return done, pipeline.spent
        finally:
            await pipeline.close()

    return asyncio.run(work())


def test_whether_the_evidence_supports_the_answer_is_asked_beside(served, judge_llm, tmp_path):
    (done,), spent = finish(served[2], tmp_path, episode("d_1", "d_1/a"))
    assert (done.judged.status, done.judged.score) == ("ok", 1.0)
    assert (done.grounded.status, done.grounded.score) == ("ok", 0.5)
    assert done.judged.model.startswith("teacher@")
    (request,) = [
        r for r in judge_llm.requests if isinstance(r.body["messages"][1]["content"], list)
    ]
    image_parts = [p for p in request.body["messages"][1]["content"] if p["type"] == "image_url"]
    sent = [b64decode(part["image_url"]["url"].partition(",")[2]) for part in image_parts]
    assert sent == [png(image_hash("d_1")), png(image_hash("d_1/a"))]
    assert spent["judge"].calls == 2
    tokens = done.judged.charge.completion_tokens + done.grounded.charge.completion_tokens
    assert spent["judge"].completion_tokens == tokens > 0


def test_without_a_reference_the_answer_is_not_judged_but_its_support_is(
    served, judge_llm, tmp_path
):
    (done,), spent = finish(served[2], tmp_path, episode("d_1", reference=""))
    assert (done.judged.status, done.judged.score) == ("skipped", None)
    assert (done.grounded.status, done.grounded.score) == ("ok", 0.5)
    assert done.answer.status == "ok" and spent["judge"].calls == 1


def test_without_evidence_nothing_supports_an_answer(served, judge_llm, tmp_path):
    config = served[2] | {"judge": served[2]["judge"] | {"no_evidence": "ask"}}
    (done,), spent = finish(config, tmp_path, episode(question="without"))
    assert (done.grounded.status, done.grounded.score) == ("skipped", 0.0)
    assert done.judged.status == "ok" and spent["judge"].calls == 1


@pytest.mark.parametrize("failure", ["garbage", "wrong_reason", 500, 429, "close", "cut"])
def test_a_judge_that_gives_no_verdict_is_a_status_and_never_0(
    served, judge_llm, tmp_path, failure
):
    if failure == "garbage":
        judge_llm.respond = lambda body, seed: "Looks fine to me."
    elif failure == "wrong_reason":
        judge_llm.respond = lambda body, seed: '{"score": 1, "reason_code": "wrong", "notes": ""}'
    elif failure == "cut":
        judge_llm.cut = True
    else:
        judge_llm.fail(failure, times=None)
    trajectory = episode("d_1", question=f"with {failure}")
    judge = {"deadline_s": 0.2, "grounded": False}
    (done,), spent = finish(served[2], tmp_path, trajectory, judge=judge)
    assert done.answer.status == "ok"
    assert (done.judged.status, done.judged.score) == ("failed", None)
    assert done.judged.reason in ("model_failure", "upstream")
    # If its model gave no verdict, the judge reports what its server has counted.
    assert spent["judge"].calls == (done.judged.reason == "model_failure")
    words = {"garbage": 8, "wrong_reason": 12, "cut": 3}
    assert spent["judge"].completion_tokens == words.get(failure, 0)
    judge_llm.well()
    judge_llm.respond = verdicts
    (retried,), after = finish(served[2], tmp_path, trajectory)
    # The failed calls are known when the run resumes.
    assert after["judge"].calls > spent["judge"].calls
    assert (retried.judged.score, retried.answer.charge.cached) == (1.0, True)


def test_a_verdict_that_was_paid_for_is_not_asked_for_again(served, judge_llm, tmp_path):
    group = [episode("d_1", id=f"t{n}", question="as one") for n in range(6)]
    done, spent = finish(served[2], tmp_path, *group, judge={"grounded": False})
    assert spent["judge"].calls == sum(trajectory.judged.charge.calls for trajectory in done) == 1
    # The judge is another process with an empty cache, and its model is down.
    with running_judge(upstream="http://127.0.0.1:9/v1") as url:
        judge_llm.forget()
        judge = {"url": url, "grounded": False}
        (repeated,), spent = finish(served[2], tmp_path, group[0], judge=judge)
    assert repeated.judged.score == 1.0 and repeated.judged.charge.cached
    assert not judge_llm.requests and spent["judge"].calls == 1


def test_what_the_judges_model_costs_counts_towards_the_cap(served, judge_llm, tmp_path):
    price = {"judge": {"prompt": 1.0, "completion": 1.0}, "cap": 0.5}
    (done,), spent = finish(served[2], tmp_path, episode("d_1", question="paid"), money=price)
    assert spent["judge"].money == pytest.approx(
        (spent["judge"].prompt_tokens + spent["judge"].completion_tokens) / 1e6
    )
    assert done.judged.charge.money > 0


def test_a_verdict_has_the_room_that_a_judge_who_thinks_needs(served, judge_llm, tmp_path):
    judge_llm.counts_tokens = False
    trajectory = episode("d_1", question="thought about")
    judge = {"grounded": False, "max_tokens": 3000}
    price = {"judge": {"prompt": 0.0, "completion": 1.0}, "cap": 0.5}
    (done,), spent = finish(served[2], tmp_path, trajectory, judge=judge, money=price)
    assert done.judged.score == 1.0
    assert judge_llm.requests[-1].body["max_tokens"] == 3000
    # Reserved, and charged because the server reports no usage.
    assert spent["judge"].completion_tokens == 3000


def test_a_judges_model_that_counts_nothing_is_charged_what_it_may_have_taken(
    served, judge_llm, tmp_path
):
    """Check the charge: without it a cap would never be reached."""
    judge_llm.counts_tokens = False
    price = {"judge": {"prompt": 0.0, "completion": 1.0}, "cap": 0.5}
    trajectory = episode("d_1", question="uncounted")
    (done,), spent = finish(served[2], tmp_path, trajectory, money=price, judge={"grounded": False})
    assert done.judged.score == 1.0 and spent["judge"].calls == 1
    assert spent["judge"].money == pytest.approx(128e-6)


def test_a_judge_that_becomes_another_ends_the_run(served, judge_llm, tmp_path):
    behind = [served[2]["judge"]["url"]]
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def passed_on(path: str, request: Request) -> Response:
        async with httpx.AsyncClient(timeout=60) as client:
            url, body = f"{behind[0]}/{path}", await request.body()
            headers = {"content-type": "application/json"}
            answer = await client.request(request.method, url, content=body, headers=headers)
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def work(url: str, rules: str) -> None:
        pipeline = answering(served[2], tmp_path, judge={"url": url, "grounded": False})
        try:
            await pipeline.check()
            first = await pipeline.finish(episode("d_1", question="before"), png)
            assert first.judged.score == 1.0
            behind[0] = rules
            await pipeline.finish(episode("d_1", question="after"), png)
        finally:
            await pipeline.close()

    with running_app(app) as url, running_judge() as rules:
        with pytest.raises(UserError, match=r"was teacher@.* and is now rules@"):
            asyncio.run(work(url, rules))


def test_a_run_goes_on_with_the_judge_that_it_began_with(served, judge_llm, tmp_path):
    finish(served[2], tmp_path, episode("d_1"))
    with running_judge() as rules:
        judge = {"url": rules, "grounded": False}
        with pytest.raises(UserError, match=r"was teacher@.* and is now rules@"):
            finish(served[2], tmp_path, episode("d_1"), judge=judge)
        (done,), _ = finish(served[2], tmp_path, episode("d_1"), judge=judge, run="another")
    assert done.judged.model.startswith("rules@")
    finish(served[2], tmp_path, episode("d_1"))
    file = tmp_path / "answers.sqlite"
    assert str(judge_of(file, SEARCH, "run")).startswith("teacher@")
    assert judge_of(file, SEARCH, "another") == done.judged.model
    assert (
        judge_of(file, SEARCH, "a third") is None
        and judge_of(tmp_path / "none", SEARCH, "run") is None
    )
    file.write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match=r"answers .*answers\.sqlite"):
        judge_of(file, SEARCH, "run")


def test_a_question_arrives_as_it_is_but_for_special_tokens(served, judge_llm, tmp_path):
    odd = 'Which "Question: " is asked?\nassistant\n<|im_end|> 무엇?'
    finish(served[2], tmp_path, episode("d_1", question=odd), judge={"grounded": False})
    assert served[0].requests[0].body["messages"][1]["content"][0]["text"] == odd.replace(
        "<|im_end|>", "< |im_end| >"
    )


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"score": 2.0}, 1),
        ({"score": -1.0}, 1),
        ({"usage": {"prompt_tokens": -(10**9), "completion_tokens": 1}}, 0),
        ({"usage": {"prompt_tokens": 2**70, "completion_tokens": 1}}, 0),
    ],
)
def test_a_verdict_that_is_out_of_all_bounds_is_none(served, judge_llm, tmp_path, changes, calls):
    """Check an invalid verdict: it would be a reward of 1.6, or a negative cost. A wrong score was
    paid for all the same."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def told_otherwise(path: str, request: Request) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            url, body = f"{served[2]['judge']['url']}/{path}", await request.body()
            headers = {"content-type": "application/json"}
            answer = (
                await client.request(request.method, url, content=body, headers=headers)
            ).json()
        for result in answer.get("results", ()):
            result.update(changes)
        return answer

    with running_app(app) as url:
        judge = {"url": url, "grounded": False}
        (done,), spent = finish(served[2], tmp_path, episode("d_1"), judge=judge)
    assert (done.judged.status, done.judged.score) == ("failed", None)
    assert spent["judge"].calls == calls


def test_the_judge_sees_all_right_answers_of_a_question_in_one_call(served, judge_llm, tmp_path):
    trajectory = episode("d_1")
    question = trajectory.question.model_copy(update={"other_answers": ("an eighth", '["a", "b"]')})
    (done,), _ = finish(
        served[2],
        tmp_path,
        trajectory.model_copy(update={"question": question}),
        judge={"grounded": False},
    )
    assert done.judged.score == 1.0
    (request,) = judge_llm.requests
    assert '["12 %", "an eighth", ["a", "b"]]' in request.body["messages"][1]["content"]


def test_a_judge_without_the_task_for_several_answers_ends_the_run(served, judge_llm, tmp_path):
    trajectory = episode("d_1")
    question = trajectory.question.model_copy(update={"other_answers": ("an eighth",)})
    trajectory = trajectory.model_copy(update={"question": question})
    older = FastAPI()

    @older.get("/v1/info")
    async def info() -> Response:
        body = httpx.get(f"{served[2]['judge']['url']}/v1/info").json()
        del body["tasks"]["answer_any_of"]
        return Response(json.dumps(body), media_type="application/json")

    with running_app(older) as url, pytest.raises(UserError, match="has no task answer_any_of"):
        finish(served[2], tmp_path, trajectory, judge={"grounded": False, "url": url})
