"""Check the path from an episode to its judged answer, with a generator and a judge on real
ports."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import httpx
import pytest

from scorekit.errors import UserError
from scorekit.paid.account import BudgetExceeded, sum_charges
from testing.judge import running_judge
from testing.servers import free_port
from tests.kits.trainer.search_answers import PICTURES, answering, episode, image_hash, serving
from trainer.search.answer.config import WITHOUT_IMAGES
from trainer.search.reward import answer_stats


@pytest.fixture(scope="module")
def served():
    with serving() as (fake, config):
        yield fake, config


@pytest.fixture
def fake(served):
    served[0].well()
    served[0].forget()
    served[0].respond = lambda body, seed: "12 percent"
    return served[0]


def finished(served, folder, *trajectories, keep=None, **sections):
    """Return the finished trajectories, and the totals and stats of the run at its end."""

    async def work():
        pipeline = answering(served[1], folder, **sections)
        try:
            await pipeline.check()
            done = [pipeline.finish(t, keep or PICTURES.__getitem__) for t in trajectories]
            answered = await asyncio.gather(*done)
            stats = answer_stats(answered) | pipeline.stats()
            assert pipeline.stats()["answers/retries"] == 0, "of the last call alone"
            return answered, sum_charges(pipeline.spent.values()), stats
        finally:
            await pipeline.close()

    return asyncio.run(work())


def test_an_answer_comes_from_the_evidence_and_is_judged(served, fake, tmp_path):
    (done,), totals, stats = finished(served, tmp_path, episode("deck_1", "deck_1/a", "deck_2"))
    answer, judged = done.answer, done.judged
    assert (answer.status, answer.text, answer.model) == ("ok", "12 percent", "generator")
    assert answer.evidence == [image_hash("deck_1"), image_hash("deck_2"), image_hash("deck_1/a")]
    assert (judged.status, judged.score) == ("ok", 1.0)
    assert judged.model.startswith("rules@") and judged.reason == "correct: numeric match"
    assert done.grounded is None
    (request,) = fake.requests
    text, *images = request.body["messages"][1]["content"]
    assert text["text"] == "How much?"
    sent = [b64decode(image["image_url"]["url"].partition(",")[2]) for image in images]
    assert sent == [PICTURES[image] for image in answer.evidence]
    assert (answer.charge.calls, answer.charge.completion_tokens) == (1, 2)
    assert (
        totals.calls == 1 + judged.charge.calls
        and stats["answers/ok"] == stats["answers/judged_ok"] == 1
    )
    assert stats["cost/generator_prompt_tokens"] == answer.charge.prompt_tokens > 0


def test_a_wrong_answer_is_judged_0_and_one_that_failed_is_not_judged(served, fake, tmp_path):
    def respond(body, seed):
        return "" if "silent" in str(body) else "13"

    fake.respond = respond
    episodes = [episode("deck_1"), episode("deck_1", question="silent", id="t2")]
    (wrong, silent), _, stats = finished(served, tmp_path, *episodes)
    assert (wrong.judged.status, wrong.judged.score) == ("ok", 0.0)
    assert (silent.answer.status, silent.answer.text) == ("failed", None)
    assert silent.answer.error.startswith("malformed")
    assert (silent.judged.status, silent.judged.score) == ("failed", None)
    assert stats["answers/judged_ok"] == 1 and stats["answers/failed"] == 1


@pytest.mark.parametrize("status", [429, 500, 503, "close", "not_json", "no_choices"])
def test_what_the_generator_does_wrong_is_a_status_and_never_0(served, fake, tmp_path, status):
    fake.fail(status, times=None)
    (done,), totals, _ = finished(served, tmp_path, episode("deck_1"))
    assert done.answer.status == done.judged.status == "failed"
    assert done.judged.score is None and done.answer.error
    assert totals.calls == 0
    fake.well()
    (retried,), _, _ = finished(served, tmp_path, episode("deck_1"))
    assert retried.judged.score == 1.0  # a failure is not cached


def test_thinking_before_an_answer_is_none_of_it(served, fake, tmp_path):
    fake.respond = lambda body, seed: "<think>\n13, or not?\n</think>\n\n12 percent"
    (done,), _, _ = finished(served, tmp_path, episode("deck_1"))
    assert done.answer.text == "12 percent" and done.judged.score == 1.0
    fake.respond = lambda body, seed: "<think>\nnothing\n</think>\n"
    (done,), _, _ = finished(served, tmp_path / "b", episode("deck_1"))
    assert done.answer.status == "failed"


def test_a_text_that_was_cut_is_no_answer_and_is_paid_for_once(served, fake, tmp_path):
    fake.finish_reason = "length"
    for _ in range(2):
        (done,), totals, _ = finished(served, tmp_path, episode("deck_1"))
        assert done.answer.status == "failed" and "max_output_tokens" in done.answer.error
        assert totals.calls == len(fake.requests) == 1


@pytest.mark.parametrize("reason", ["tool_calls", "repetition"])
def test_a_text_that_ended_in_another_way_is_no_answer(served, fake, tmp_path, reason):
    fake.finish_reason = reason
    (done,), _, _ = finished(served, tmp_path, episode("deck_1"))
    assert done.answer.status == "failed" and "finish_reason" in done.answer.error


def test_a_generator_that_hangs_once_costs_one_retry_and_not_the_answer(served, fake, tmp_path):
    fake.hang = lambda body: len(fake.requests) == 1
    brief = {"request_timeout_s": 0.2, "deadline_s": 60.0, "max_output_tokens": 5120}
    brief["max_attempts"] = 3
    (done,), totals, stats = finished(served, tmp_path, episode("deck_1"), generator=brief)
    assert (done.answer.status, done.judged.score) == ("ok", 1.0)
    assert (stats["answers/retries"], len(fake.requests), totals.calls) == (1, 2, 1)


def test_an_account_without_money_ends_the_run_at_once(served, fake, tmp_path):
    fake.fail(402, times=None, message="Insufficient Balance")
    with pytest.raises(UserError, match="Insufficient Balance"):
        finished(served, tmp_path, episode("deck_1"))
    assert len(fake.requests) == 1


def test_a_hanging_generator_fails_at_the_deadline_and_its_late_answer_is_kept(
    served, fake, tmp_path
):
    async def work():
        pipeline = answering(served[1], tmp_path, generator={"deadline_s": 0.2})
        try:
            fake.hang = True
            first = await pipeline.finish(episode("deck_1"), PICTURES.__getitem__)
            fake.hang = False
            second = first
            async with asyncio.timeout(30):
                # The deadline of this attempt is short, too.
                while second.answer.status == "failed":
                    second = await pipeline.finish(episode("deck_1"), PICTURES.__getitem__)
            return first, second
        finally:
            await pipeline.close()

    first, second = asyncio.run(work())
    assert (first.answer.status, first.judged.score) == ("failed", None)
    assert first.answer.error.startswith("timeout")
    assert second.judged.score == 1.0 and second.answer.charge.cached
    assert len(fake.requests) == 1


def test_no_evidence_is_judged_0_without_a_call_or_asked_without_pictures(served, fake, tmp_path):
    (done,), totals, stats = finished(served, tmp_path, episode())
    assert (done.answer.status, done.answer.error) == ("skipped", "no evidence")
    assert (done.judged.status, done.judged.score) == ("skipped", 0.0)
    assert not fake.requests and totals.calls == 0 and stats["answers/no_evidence"] == 1
    (done,), _, _ = finished(served, tmp_path, episode(), judge={"no_evidence": "ask"})
    assert (done.answer.status, done.answer.evidence) == ("ok", [])
    assert fake.requests[0].body["messages"][0]["content"] == WITHOUT_IMAGES
    assert done.judged.status == "ok"


@pytest.mark.parametrize("end", ["declined", "failed"])
def test_an_episode_that_was_given_up_or_failed_is_not_answered(served, fake, tmp_path, end):
    (done,), _, _ = finished(served, tmp_path, episode("deck_1", end=end))
    assert (done.answer.status, done.judged.status, done.judged.score) == (
        "skipped",
        "skipped",
        None,
    )
    assert end in done.answer.error and not fake.requests


@pytest.mark.parametrize("end", ["forced", "context"])
def test_an_end_that_came_of_a_budget_is_answered(served, fake, tmp_path, end):
    (done,), _, _ = finished(served, tmp_path, episode("deck_1", end=end))
    assert done.judged.score == 1.0


def test_equal_evidence_is_asked_about_once_also_at_the_same_time(served, fake, tmp_path):
    group = [episode("deck_1", id=f"t{n}") for n in range(8)]
    done, totals, _ = finished(served, tmp_path, *group)
    assert [t.judged.score for t in done] == [1.0] * 8
    assert len(fake.requests) == 1
    assert sorted(t.answer.charge.cached for t in done) == [False] + [True] * 7
    assert sum(t.answer.charge.calls for t in done) == 1
    assert totals.calls == 1 + sum(t.judged.charge.calls for t in done)


def test_answers_follow_their_episode_in_any_order(served, fake, tmp_path):
    fake.respond = lambda body, seed: str(body["messages"][1]["content"][0]["text"])
    numbers = [7, 3, 11, 5, 2, 9]
    episodes = [episode("deck_1", question=f"{n}", id=f"t{n}", reference=f"{n}") for n in numbers]
    done, _, _ = finished(served, tmp_path, *episodes)
    assert [(t.trajectory_id, t.answer.text) for t in done] == [(f"t{n}", f"{n}") for n in numbers]
    assert all(t.judged.score == 1.0 for t in done)


@pytest.mark.parametrize(
    "other",
    [
        {"effort": "high"},
        {"temperature": 0.0},
        {"max_output_tokens": 512},
        {"system": "Be brief."},
        {"api": "responses"},
    ],
)
def test_other_settings_are_another_question(served, fake, tmp_path, other):
    finished(served, tmp_path, episode("deck_1"))
    finished(served, tmp_path, episode("deck_1"))
    assert len(fake.requests) == 1
    (done,), _, _ = finished(served, tmp_path, episode("deck_1"), generator=other)
    assert len(fake.requests) == 2 and done.judged.score == 1.0


@pytest.mark.parametrize("first", ["original", "shown"])
def test_a_change_of_images_is_not_answered_from_the_cache(served, fake, tmp_path, first):
    searched = episode("deck_1")
    searched.turns[0].views[0].original = image_hash("deck_1, larger")
    sent = {"original": image_hash("deck_1, larger"), "shown": image_hash("deck_1")}
    second = "shown" if first == "original" else "original"
    for mode, calls in ((first, 1), (second, 1), (first, 0)):
        (done,), _, _ = finished(served, tmp_path, searched, generator={"images": mode})
        assert done.answer.evidence == [sent[mode]]
        assert done.answer.charge.calls == calls
    (request, other_request) = fake.requests
    assert request.body["messages"][1] != other_request.body["messages"][1]


def test_an_episode_without_originals_ends_the_run(served, fake, tmp_path):
    older = episode("deck_1")
    older.turns[0].views[0].original = None
    with pytest.raises(UserError, match="Set it to shown, or begin a new run"):
        finished(served, tmp_path, older)
    assert not fake.requests


def test_a_picture_that_is_not_there_is_our_fault_and_raises(served, fake, tmp_path):
    with pytest.raises(KeyError):
        finished(served, tmp_path, episode("deck_1"), keep={}.__getitem__)
    assert not fake.requests


def test_servers_are_met_before_anything_is_asked(served, fake, tmp_path):
    nobody = f"http://127.0.0.1:{free_port()}"
    wrong = [
        ({"generator": {"base_url": f"{nobody}/v1"}}, "cannot connect to"),
        ({"generator": {"model": "other"}}, "'other'"),
        ({"generator": {"model": ""}}, "generator.model"),
        ({"judge": {"url": nobody, "deadline_s": 0.1}}, "no judge answers"),
        ({"judge": {"model": "gpt"}}, "has 'rules', not 'gpt'"),
        ({"judge": {"grounded": True}}, "judge.grounded"),
    ]
    for sections, words in wrong:
        with pytest.raises(UserError, match=words):
            finished(served, tmp_path, episode("deck_1"), **sections)
    assert not fake.requests


def test_a_judge_that_goes_away_fails_verdicts_and_loses_no_answer(served, fake, tmp_path):
    async def work():
        with running_judge() as judge:
            pipeline = answering(served[1], tmp_path, judge={"url": judge, "deadline_s": 0.1})
            await pipeline.check()
        try:
            return await pipeline.finish(episode("deck_1"), PICTURES.__getitem__)
        finally:
            await pipeline.close()

    done = asyncio.run(work())
    assert (done.answer.status, done.judged.status, done.judged.score) == ("ok", "failed", None)
    assert done.judged.reason == "unreachable"
    (done,), _, _ = finished(served, tmp_path, episode("deck_1"))
    assert done.judged.score == 1.0 and len(fake.requests) == 1


def test_a_key_is_sent_and_never_told(served, fake, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GENERATOR_API_KEY", "sk-hidden")
    finished(served, tmp_path, episode("deck_1"))
    assert fake.requests[0].headers["authorization"] == "Bearer sk-hidden"
    assert "sk-hidden" not in caplog.text
    assert httpx.get(served[1]["judge"]["url"] + "/health/live").status_code == 200


def test_a_server_that_counts_nothing_is_charged_what_the_call_may_have_taken(
    served, fake, tmp_path
):
    """Check the charge: without it a cap would never be reached."""
    fake.counts_tokens = False
    money = {"generator": {"prompt": 0.0, "completion": 1e6}, "cap": 100.0}
    generator = {"max_output_tokens": 64}
    (done,), totals, _ = finished(
        served, tmp_path, episode("deck_1"), money=money, generator=generator
    )
    assert done.answer.status == "ok" and done.answer.charge.prompt_tokens > 1500
    assert (done.answer.charge.completion_tokens, totals.money) == (64, 64.0)
    with pytest.raises(BudgetExceeded):
        finished(served, tmp_path, episode("deck_2"), money=money, generator=generator)


@pytest.mark.parametrize(
    ("answer", "other_answers", "score"),
    [
        ("12 percent", ("about an eighth", "12 %"), 1.0),
        ("12 percent", ('["12 %", "White"]',), 0.0),
        ("White and 12 percent", ('["12 %", "White"]',), 1.0),
    ],
)
def test_an_answer_is_right_if_it_equals_any_of_the_right_ones(
    served, fake, tmp_path, answer, other_answers, score
):
    fake.respond = lambda body, seed: answer
    trajectory = episode("deck_1", reference="13 %")
    question = trajectory.question.model_copy(update={"other_answers": other_answers})
    trajectory = trajectory.model_copy(update={"question": question})
    (done,), _, stats = finished(served, tmp_path, trajectory)
    assert (done.judged.status, done.judged.score) == ("ok", score)
    assert stats["answers/judged_ok"] == 1
