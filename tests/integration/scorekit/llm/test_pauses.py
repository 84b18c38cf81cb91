"""Check pauses before a retry: none outlasts the deadline, holds a slot, or serves a caller who has
left. No test waits for a pause: they replace the client's `sleep`."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import SecretStr

from scorekit.llm import LLMError, Sampling
from testing.servers import PATIENCE_S, free_port
from tests.kits.llm import MESSAGES, SAMPLED, ask, client, until


@pytest.fixture
def pauses(monkeypatch):
    """Return the seconds of all pauses; each ends at once."""
    seconds_of_pauses = []

    async def sleep(seconds):
        seconds_of_pauses.append(seconds)

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    return seconds_of_pauses


@pytest.fixture
def gate(monkeypatch):
    """Return an event for which all pauses wait; `gate.pauses` counts them."""
    event = asyncio.Event()
    event.pauses = 0

    async def sleep(seconds):
        event.pauses += 1
        await event.wait()

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    return event


def start(llm, name, **options):
    return asyncio.create_task(llm.chat(MESSAGES, SAMPLED, request_id=name, **options))


def run(work):
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def error_of(url, fake, deadline_s=30.0, **settings):
    """Return the client and the error of a call with a deadline."""

    async def work():
        async with client(url, fake, **settings) as llm:
            with pytest.raises(LLMError) as error_info:
                await llm.chat(MESSAGES, SAMPLED, request_id="r", deadline_s=deadline_s)
            return llm, error_info.value

    return run(work())


@pytest.mark.parametrize("status", [429, 500, 503, 408])
@pytest.mark.parametrize("seconds", ["3600", "31", "1e9"])
def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once(
    url, fake, pauses, status, seconds
):
    fake.fail(status, times=None, headers={"retry-after": seconds})
    _, error = error_of(url, fake)
    assert not pauses and len(fake.requests) == 1
    assert error.retryable and error.status == status
    assert f"HTTP {status}" in error.message and error.late_pause_s >= float(seconds)
    assert error.message.endswith("s would come after the deadline")


@pytest.mark.parametrize("failure", [429, 500, 503, "close", "not_json"])
def test_a_backoff_beyond_the_deadline_ends_the_call_at_once(url, fake, pauses, failure):
    fake.fail(failure, times=None)
    llm, error = error_of(url, fake, backoff_s=(1.0, 100.0))
    assert len(pauses) == 1 and len(fake.requests) == 2
    assert error.late_pause_s >= 75 and llm.counts.failures == 1


def test_an_absent_server_is_not_waited_for_beyond_the_deadline(fake, pauses):
    url = f"http://127.0.0.1:{free_port()}/v1"
    _, error = error_of(url, fake, backoff_s=(100.0,), wait_for_server_s=3600.0)
    assert error.type == "unreachable" and not pauses and "deadline" in error.message


def test_without_a_deadline_a_retry_after_is_waited_for_up_to_ten_minutes(url, fake, pauses):
    fake.fail(429, headers={"retry-after": "3600"})
    _, [choice] = ask(url, fake)
    assert choice.text and 600 <= pauses[0] <= 660


def test_milliseconds_of_a_retry_after_are_understood(url, fake, pauses):
    fake.fail(429, headers={"retry-after-ms": "2500", "retry-after": "30"})
    ask(url, fake)
    assert 2.5 <= pauses[0] <= 2.75


def test_a_pause_holds_up_no_other_request(url, fake, gate):
    """Check that the only slot is free in a pause, and that its request is the next to get it."""

    async def work():
        async with client(url, fake, max_concurrency=1) as llm:
            fake.fail(429, headers={"retry-after": "20"}, only=lambda body: not gate.pauses)
            first = start(llm, "first", deadline_s=3600.0)
            await until(lambda: gate.pauses)
            assert llm._in_flight.requests_in_flight == 0
            assert (await start(llm, "second"))[0].text  # in the pause
            fake.hang = True
            later_calls = [start(llm, name) for name in ("third", "fourth")]
            await until(lambda: fake.in_flight == 1)
            gate.set()
            await until(lambda: len(llm._in_flight._waiting) == 2)
            fake.hang = False
            await asyncio.gather(first, *later_calls)
            assert llm._in_flight.requests_in_flight == 0

    run(work())
    assert [r.id for r in fake.requests] == ["first", "second", "third", "first", "fourth"]


def test_a_cancelled_pause_gives_nothing_back_twice(url, fake, gate):
    async def work():
        async with client(url, fake, max_concurrency=1) as llm:
            fake.fail(429, headers={"retry-after": "20"})
            first = start(llm, "first")
            await until(lambda: gate.pauses)
            first.cancel()
            await asyncio.wait([first])
            assert llm._in_flight.requests_in_flight == 0
            fake.hang = True
            calls = [start(llm, name) for name in ("second", "third")]
            await until(lambda: fake.in_flight == 1)
            await asyncio.sleep(0)
            assert llm._in_flight.requests_in_flight == 1
            fake.hang = False
            await asyncio.gather(*calls)

    run(work())


def test_a_pause_ends_when_the_caller_has_left_and_nothing_more_is_sent(url, fake, monkeypatch):
    waiting, steps = [True], []

    async def sleep(seconds):
        steps.append(seconds)
        waiting[0] = len(steps) < 3

    monkeypatch.setattr("scorekit.llm.client.sleep", sleep)
    fake.fail(429, times=None, headers={"retry-after": "50"})

    async def work():
        async with client(url, fake, max_concurrency=1) as llm:
            with pytest.raises(LLMError) as error_info:
                await llm.chat(
                    MESSAGES,
                    SAMPLED,
                    request_id="r",
                    deadline_s=60.0,
                    is_wanted=lambda: waiting[0],
                )
            assert llm._in_flight.requests_in_flight == 0
            return error_info.value

    error = run(work())
    assert (error.cause, error.retryable) == ("left", False)
    assert len(fake.requests) == 1 and len(steps) == 3 and max(steps) <= 0.5


def test_a_pause_of_a_caller_who_waits_lasts_as_long(url, fake, pauses):
    fake.fail(429, headers={"retry-after": "20"})

    async def work():
        async with client(url, fake) as llm:
            options = {"deadline_s": 60.0, "is_wanted": lambda: True}
            assert (await start(llm, "r", **options))[0].text

    run(work())
    assert 20 <= sum(pauses) <= 22 and max(pauses) <= 0.5


def test_nothing_is_sent_for_a_caller_who_left_while_others_were_first(url, fake):
    async def work():
        async with client(url, fake, max_concurrency=1) as llm:
            fake.hang, waiting = True, [True]
            first = start(llm, "first")
            await until(lambda: fake.in_flight)
            second = start(llm, "second", is_wanted=lambda: waiting[0])
            await asyncio.sleep(0)
            waiting[0] = fake.hang = False
            await first
            with pytest.raises(LLMError, match="nobody waits"):
                await second

    run(work())
    assert [r.id for r in fake.requests] == ["first"]


def test_a_request_whose_turn_does_not_come_before_its_deadline_is_not_sent(url, fake):
    async def work():
        async with client(url, fake, max_concurrency=1) as llm:
            fake.hang = True
            first = start(llm, "first")
            await until(lambda: fake.in_flight)
            with pytest.raises(LLMError, match=r"not sent within 0\.05 s") as error_info:
                await start(llm, "late", deadline_s=0.05)
            fake.hang = False
            await first
            return error_info.value

    error = run(work())
    assert (error.type, error.cause) == ("timeout", "no_turn")
    assert [r.id for r in fake.requests] == ["first"]


def test_a_rate_limit_counts_neither_late_nor_cancelled_requests(url, fake):
    async def work():
        async with client(url, fake, requests_per_minute=1, max_concurrency=8) as llm:
            await start(llm, "first")
            next_at = llm._spacing._next
            with pytest.raises(LLMError, match="not sent within"):
                await start(llm, "late", deadline_s=0.05)
            cancelled = start(llm, "cancelled")
            await until(lambda: llm._in_flight.requests_in_flight == 1)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert llm._spacing._next == next_at and not llm._spacing._turn.locked()
            assert llm._in_flight.requests_in_flight == 0

    run(work())
    assert [r.id for r in fake.requests] == ["first"]


def test_an_error_with_status_200_is_the_error_that_it_states(url, fake, pauses):
    """Check a server that had begun its answer, so that its status could not change any more."""
    too_long = '{"error": {"code": 400, "message": "x", "type": "exceed_context_size_error"}}'
    busy = '{"error": {"code": 429, "message": "slow down"}}'
    for body, type, num_requests in ((too_long, "overlong", 1), (busy, "overloaded", 3)):
        fake.forget()
        fake.raw = body
        _, error = ask(url, fake, Sampling(max_tokens=8), max_attempts=3)
        assert (error.type, len(fake.requests)) == (type, num_requests)


def test_no_error_about_an_answer_of_another_form_has_a_secret_or_a_control_character(url, fake):
    fake.raw = "\x1b[2J <html>\n open-sesame " + "x" * 5000
    _, error = ask(url, fake, max_attempts=1, api_key=SecretStr("open-sesame"))
    assert error.type == "malformed" and "not a chat completion" in error.message
    assert str(error).isprintable() and "sesame" not in str(error) and len(str(error)) < 400
