"""Test a policy behind an OpenAI-compatible server: the requests it gets, and its failures."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.llm import LLMClient, Sampling
from testing.openai_server import FakeOpenAI
from tests.kits.trainer.searching.episodes import COMPLETE, ask, played, search
from trainer.search.images.image_data import image_hash
from trainer.search.records import Trajectory
from trainer.search.rollout.policies import ChatPolicy


def one_search(body: dict[str, Any], seed: int | None) -> str:
    """Search once, then end; the question may ask for a wrong reply."""
    question = body["messages"][1]["content"]
    if len(body["messages"]) > 2:
        return COMPLETE
    return "nothing of sense" if "wrong" in question else search("births 1990")


@contextmanager
def chatting(**settings: Any) -> Iterator[tuple[FakeOpenAI, ChatPolicy]]:
    fake = FakeOpenAI("searcher", respond=one_search)
    options = {"backoff_s": (0.0,), "max_attempts": 2} | settings
    with fake.running() as url:
        policy = ChatPolicy(lambda: LLMClient(url, "searcher", **options), Sampling(max_tokens=64))
        try:
            yield fake, policy
        finally:
            policy.close()


def ends(done: list[Trajectory]) -> list[str | None]:
    return [trajectory.end for trajectory in done]


def test_it_is_sent_the_whole_conversation_with_its_pictures() -> None:
    with chatting() as (fake, policy):
        policy.check()
        image_by_hash: dict[str, bytes] = {}
        rows = [ask("a", temperature=0.25), ask("b", text="wrong"), ask("한국어")]
        done = played(policy, rows, pictures=image_by_hash)
    assert ends(done) == ["complete"] * 3
    assert [turn.action for turn in done[0].turns] == ["search", "complete"]
    assert done[1].turns[0].reason == "no_think" and done[0].policy.startswith("searcher at http")
    assert done[0].tokens is None and all(
        turn.tokens for trajectory in done for turn in trajectory.turns
    )
    assert all(turn.policy_s > 0 for trajectory in done for turn in trajectory.turns)
    bodies = {request.id: request.body for request in fake.requests}
    assert len(bodies) == 6 and bodies["a/0-1"]["temperature"] == 0.25
    second = bodies["a/0-2"]["messages"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == search("births 1990")
    image, text = second[3]["content"]
    png = b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert image_hash(png) == done[0].turns[0].views[0].image in image_by_hash
    assert text["text"].startswith("Page deck_1, rank 1 of 3")


def test_it_writes_no_more_than_is_left_to_it() -> None:
    with chatting() as (fake, policy):
        done = played(policy, max_response_length=2)
    assert [request.body["max_tokens"] for request in fake.requests] == [2]
    assert ends(done) == ["forced"] and done[0].end_detail == "max_response_length"


def test_a_server_that_counts_no_tokens_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Check the warning: without counts max_response_length would silently have no effect."""
    with chatting() as (fake, policy):
        fake.counts_tokens = False
        done = played(policy, [ask("a"), ask("b")], max_response_length=2)
    assert ends(done) == ["complete"] * 2 and done[0].turns[0].tokens is None
    assert caplog.text.count("does not report tokens") == 1


def test_a_turn_that_its_server_fails_to_give_ends_that_episode_alone() -> None:
    with chatting(max_attempts=1) as (fake, policy):
        fake.fail(500, times=2)
        rows = [ask(name) for name in "abcd"]
        done = played(policy, rows)
        assert sorted(map(str, ends(done))) == ["complete", "complete", "failed", "failed"]
        failed = [trajectory for trajectory in done if trajectory.end == "failed"]
        assert all(
            trajectory.end_detail.startswith("policy: server_error") for trajectory in failed
        )
        assert not any(trajectory.turns for trajectory in failed)
        fake.well()
        for failure in ("not_json", "no_choices", "close", 429):
            fake.fail(failure)
            assert ends(played(policy, rows[:1])) == ["failed"]


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls"])
def test_a_turn_that_its_server_withholds_is_none_of_the_policy(reason: str) -> None:
    with chatting() as (fake, policy):
        fake.finish_reason = reason
        (failed,) = played(policy)
        assert failed.end == "failed" and f"finish_reason '{reason}'" in failed.end_detail
        assert not failed.turns
        fake.finish_reason = "length"  # a turn that is cut at its limit is the policy's own
        assert ends(played(policy)) == ["complete"]


def test_what_its_server_finds_too_long_ends_as_that() -> None:
    with chatting() as (fake, policy):
        fake.context_length = 70
        assert ends(played(policy)) == ["context"]


@pytest.mark.parametrize(
    "message",
    [
        "Your input exceeds the context window of this model.",
        "prompt is too long: 207791 tokens > 200000 maximum",
        "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
    ],
)
def test_what_another_kind_of_server_finds_too_long_ends_as_that(message: str) -> None:
    with chatting() as (fake, policy):
        fake.fail(400, message=message)
        assert ends(played(policy)) == ["context"]


def test_a_refusal_in_place_of_a_turn_is_named() -> None:
    with chatting() as (fake, policy):
        fake.also = {"content": None, "refusal": "I cannot."}
        (failed,) = played(policy)
    assert failed.end == "failed" and "the model refused to answer" in failed.end_detail


def test_what_every_turn_would_run_into_is_the_users_to_mend() -> None:
    with chatting() as (fake, policy):
        fake.api_key = "secret"
        with pytest.raises(UserError, match="API key"):
            played(policy, [ask("a"), ask("b")])
        with pytest.raises(UserError, match="API key"):
            policy.check()


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_that_a_reasoning_parser_took_out_is_put_back(field) -> None:
    """Check the thinking: without it every turn of such a server would have no think block."""
    with chatting() as (fake, policy):
        fake.respond = lambda body, seed: "\n\n<search_complete>true</search_complete>"
        fake.also = {field: "It is clear.\n"}
        (done,) = played(policy)
        assert done.end == "complete"
        assert done.turns[0].text == (
            "<think>It is clear.</think>\n<search_complete>true</search_complete>"
        )
        # The server returns thinking, and the text has a think block as well.
        fake.respond = lambda body, seed: COMPLETE
        assert played(policy)[0].turns[0].text == COMPLETE
