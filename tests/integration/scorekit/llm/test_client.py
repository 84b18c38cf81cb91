"""Test the LLM client against a fake OpenAI server: budgets, attempts, candidates, mistakes."""

from __future__ import annotations

import asyncio

import pytest

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMError, Sampling
from testing.servers import PATIENCE_S
from tests.kits.llm import GREEDY, MESSAGES, SAMPLED, ask, client, until


def test_every_sampling_field_is_sent_even_when_it_is_the_default(url, fake):
    _, [choice] = ask(url, fake)
    body = fake.requests[0].body
    assert body == {
        "model": "teacher",
        "messages": MESSAGES,
        "n": 1,
        "seed": 1000,
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": None,
    }
    assert choice == Choice(
        0, fake.respond(body, 1000), "stop", len(fake.respond(body, 1000).split()), 7
    )


def test_a_text_cut_by_max_tokens_says_so(url, fake):
    _, [choice] = ask(url, fake, Sampling(max_tokens=3))
    assert choice.finish_reason == "length" and len(choice.text.split()) == 3


@pytest.mark.parametrize("text", [None, ""])
def test_a_choice_without_content_is_an_empty_text(url, fake, text):
    fake.respond = lambda body, seed: text
    _, [choice] = ask(url, fake)
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_a_gateway_may_name_no_finish_reason(url, fake):
    fake.finish_reason = None
    _, [choice] = ask(url, fake, Sampling(max_tokens=64), dialect="openai")
    assert choice.text and choice.finish_reason == "unknown"


def test_requests_and_tokens_are_counted(url, fake):
    fake.fail(500, times=2)
    llm, choices = ask(url, fake, n=40)
    counts = llm.counts
    assert (counts.requests, counts.retries, counts.failures, counts.choices) == (4, 2, 0, 40)
    assert counts.completion_tokens == sum(len(choice.text.split()) for choice in choices)
    assert counts.prompt_tokens == 2 * 7


def test_both_strategies_name_the_same_candidates(url, fake):
    _, one_call = ask(url, fake, n=70, strategy="n_parameter")
    assert sorted(r.body["n"] for r in fake.requests) == [6, 32, 32]
    assert sorted(r.body["seed"] for r in fake.requests) == [1000, 1032, 1064]
    fake.forget()
    _, single = ask(url, fake, n=70, strategy="per_call")
    assert [r.body["n"] for r in fake.requests] == [1] * 70
    assert sorted(r.body["seed"] for r in fake.requests) == list(range(1000, 1070))
    assert [c.index for c in one_call] == list(range(70))
    assert [(c.index, c.text) for c in one_call] == [(c.index, c.text) for c in single]
    assert len({c.text for c in single}) == 70


def _several(url, fake, num_requests, between=lambda i, llm: None):
    """Send `num_requests` requests of 5 choices, one after the other.

    Returns the texts of each, the n of each request that arrived, and the counts."""

    async def work():
        async with client(url, fake) as llm:
            texts, arrived = [], []
            for i in range(num_requests):
                between(i, llm)
                fake.forget()
                choices = await llm.chat(MESSAGES, SAMPLED, n=5, request_id=f"r{i}")
                texts.append([c.text for c in choices])
                arrived.append([r.body["n"] for r in fake.requests])
            return texts, arrived, llm.counts

    return asyncio.run(work())


ONE_BY_ONE = [1, 1, 1, 1, 1]


def test_a_server_that_refuses_n_three_times_is_asked_one_by_one(url, fake, caplog):
    [expected], _, _ = _several(url, fake, 1)
    fake.refuse_n = True
    texts, arrived, counts = _several(url, fake, 5)
    assert arrived == [[5, *ONE_BY_ONE]] * 3 + [ONE_BY_ONE] * 2
    assert texts == [expected] * 5
    assert (counts.failures, counts.retries, counts.fallbacks) == (0, 0, 3)
    assert "0 of 5 choices arrived" in caplog.text and "3 answers in a row" in caplog.text


def test_a_short_answer_now_and_then_does_not_end_the_use_of_n(url, fake):
    def every_other(i, llm):
        fake.most_choices = 2 if i % 3 else None

    _, arrived, counts = _several(url, fake, 9, every_other)
    assert arrived == [[5], [5, 1, 1, 1], [5, 1, 1, 1]] * 3 and counts.fallbacks == 6


def test_n_is_tried_again_after_a_while(url, fake):
    def for_a_while(i, llm):
        fake.most_choices = 2 if i < 6 else None
        if i in (4, 5, 7):  # the outage is over
            llm._several._retry_n_at = 0.0

    _, arrived, counts = _several(url, fake, 8, for_a_while)
    short = [5, 1, 1, 1]
    assert arrived == [short] * 3 + [ONE_BY_ONE, short, short, ONE_BY_ONE, [5]]
    assert counts.fallbacks == 5


@pytest.mark.parametrize("numbered", [True, False])
def test_of_a_short_answer_only_the_missing_choices_are_asked_again(url, fake, numbered):
    _, expected = ask(url, fake, n=5)
    fake.forget()
    fake.most_choices, fake.numbered = 2, numbered
    _, choices = ask(url, fake, n=5)
    assert [(r.body["n"], r.body["seed"]) for r in fake.requests[:2]] == [(5, 1000), (1, 1002)]
    assert sorted(r.body["seed"] for r in fake.requests[2:]) == [1003, 1004]
    assert [c.text for c in choices] == [c.text for c in expected]


def test_n_parameter_does_not_fall_back(url, fake):
    fake.most_choices = 2
    _, error = ask(url, fake, n=5, strategy="n_parameter")
    assert error.type == "incomplete"
    fake.refuse_n = True
    _, error = ask(url, fake, n=5, strategy="n_parameter")
    assert error.type == "refused" and len(fake.requests) == 2


def test_a_request_that_is_refused_for_itself_does_not_end_the_use_of_n(url, fake):
    async def work():
        async with client(url, fake) as llm:
            fake.fail(400, times=2)
            with pytest.raises(LLMError) as error_info:
                await llm.chat(MESSAGES, SAMPLED, n=5, request_id="bad")
            assert (error_info.value.type, error_info.value.retryable) == ("refused", False)
            await llm.chat(MESSAGES, SAMPLED, n=5, request_id="good")

    asyncio.run(work())
    assert [r.body["n"] for r in fake.requests] == [5, 1, 5]


def test_several_greedy_choices_are_refused_before_anything_is_sent(url, fake):
    with pytest.raises(ValueError):
        ask(url, fake, GREEDY, n=2)
    assert not fake.requests
    _, [choice] = ask(url, fake, GREEDY)
    assert choice.text == ask(url, fake, Sampling(64, 0.0, seed=5))[1][0].text


def test_without_a_seed_none_is_sent(url, fake):
    ask(url, fake, Sampling(max_tokens=64), n=40)
    assert [r.body["seed"] for r in fake.requests] == [None, None]


def _many(url, fake, requests, n, expected, **settings):
    """Hold the requests at the server, `expected` at once; then release all of them."""

    async def work():
        fake.hang = True
        async with client(url, fake, **settings) as llm:
            async with asyncio.TaskGroup() as group:
                for i in range(requests):
                    group.create_task(llm.chat(MESSAGES, SAMPLED, n=n, request_id=f"r{i}"))
                await until(lambda: fake.in_flight == expected)
                await asyncio.sleep(0.1)  # time for an extra request
                fake.hang = False

    asyncio.run(work())


def test_sequences_in_flight_never_exceed_their_cap(url, fake):
    _many(url, fake, requests=6, n=24, expected=2, max_sequences=50)
    assert (fake.peak_sequences, fake.peak_requests) == (48, 2)
    assert fake.choices_served == 6 * 24


def test_a_request_larger_than_the_cap_is_split(url, fake):
    _many(url, fake, requests=2, n=20, expected=1, max_sequences=8)
    assert fake.peak_sequences == 8
    assert sorted(r.body["n"] for r in fake.requests) == [4, 4, 8, 8, 8, 8]


def test_requests_in_flight_never_exceed_their_cap(url, fake):
    _many(url, fake, requests=12, n=1, expected=5, max_concurrency=5)
    assert fake.peak_requests == 5


def test_cancelled_requests_give_their_place_back(url, fake):
    async def work():
        async with client(url, fake, max_concurrency=2, max_sequences=4) as llm:
            fake.hang = True

            def start(n, name):
                work = llm.chat(MESSAGES, SAMPLED, n=n, request_id=name)
                return asyncio.create_task(work)

            running = [start(2, "a"), start(2, "b")]
            await until(lambda: fake.in_flight == 2)
            waiting = [start(4, "c"), start(1, "d")]
            await asyncio.sleep(0)
            waiting[0].cancel()  # the head of the queue
            running[0].cancel()
            await until(lambda: sorted(r.id for r in fake.requests) == ["a", "b", "d"])
            running[1].cancel()
            fake.hang = False
            assert len(await start(4, "e")) == 4
            await asyncio.wait([*running, *waiting])
            assert llm.counts.failures == 0 and not waiting[1].exception()

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_an_answer_that_cannot_be_kept_ends_its_call_at_once(url, fake):
    """Check that an error that is not the server's is raised before the other requests answer."""

    async def full(choices):
        raise UserError("the disk is full")

    async def work():
        async with client(url, fake, strategy="per_call") as llm:
            fake.hang = lambda body: body["seed"] != min(r.body["seed"] for r in fake.requests)
            with pytest.raises(UserError, match="the disk is full"):
                await llm.chat(MESSAGES, SAMPLED, n=3, request_id="a", keep=full)
            await until(lambda: fake.in_flight == 0)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_the_rate_limiter_spaces_the_requests(url, fake):
    ask(url, fake, n=8, strategy="per_call", requests_per_minute=600)
    times = [r.time for r in fake.requests]
    assert times[-1] - times[0] > 0.4  # seven gaps of 0.1 s, less the variation of the network


def test_an_answer_holds_its_place_until_it_is_kept(url, fake):
    """Check that a killed process loses no more paid answers than were in flight."""
    counts = []

    async def work():
        async with client(url, fake, max_concurrency=1) as llm:

            async def keep(choices):
                counts.append((len(choices), llm._in_flight.sequences_in_flight))

            await llm.chat(MESSAGES, SAMPLED, n=3, request_id="a", keep=keep)
            assert counts == [(3, 3)] and llm._in_flight.sequences_in_flight == 0

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
