"""Check retries: pauses, jitter, Retry-After and the deadline."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from tenacity import RetryCallState

from scorekit.errors import RequestError
from scorekit.llm import LLMError
from scorekit.llm.limits import RetryPolicy
from scorekit.net.retry import Deadline, exponential_wait, retry_after_s, retrying, stepped_wait

AWAY = LLMError("unreachable", "", retryable=True)
HEADERS = {
    "date": "Fri, 20 Nov 2026 10:00:00 GMT",
    "retry-after": "Fri, 20 Nov 2026 10:00:30 GMT",
}


def state(number: int, error: BaseException = AWAY) -> RetryCallState:
    """Return the state after this number of attempts, the last with this error."""
    retry_state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    retry_state.attempt_number = number
    retry_state.set_exception((type(error), error, None))
    return retry_state


def test_retry_after_is_in_seconds_or_a_date_by_the_server_s_clock() -> None:
    assert retry_after_s({"retry-after": "7.5"}) == 7.5
    assert retry_after_s(HEADERS) == 30
    assert retry_after_s(HEADERS | {"retry-after": "soon"}) is None
    assert retry_after_s({"retry-after": "-3"}) == 0
    assert retry_after_s({}) is None


def test_stepped_pauses_have_jitter_and_never_undercut_retry_after() -> None:
    wait = stepped_wait((1, 2, 4))
    pauses = [wait(state(number)) for number in range(1, 9)]
    for pause, step in zip(pauses, [1, 2, 4, 4, 4, 4, 4, 4], strict=True):
        assert 0.75 * step <= pause <= 1.25 * step
    assert len(set(pauses)) == 8
    error = LLMError("overloaded", "", retryable=True, retry_after=30.0)
    assert stepped_wait((1,))(state(1, error)) >= 30
    mistaken = LLMError("overloaded", "", retryable=True, retry_after=1e9)
    assert stepped_wait((1,))(state(1, mistaken)) <= 660


def test_growing_pauses_end_at_ten_seconds() -> None:
    for number in (1, 2, 50):
        assert 0 <= exponential_wait(state(number)) <= min(10.0, 0.2 * 2 ** (number - 1))


def test_patience_ends_after_its_attempts_and_waits_longer_for_a_server_that_is_away() -> None:
    def over(patience: RetryPolicy, number: int, error: BaseException) -> bool:
        patience.wait(state(number, error))
        return patience.stop(state(number, error))

    away = LLMError("unreachable", "", retryable=True, status=503)
    busy = LLMError("overloaded", "", retryable=True, status=429)
    assert away.server_is_away and not busy.server_is_away
    patience = RetryPolicy(3, (1.0,), 3600.0)
    assert [over(patience, number, busy) for number in (1, 2, 3)] == [False, False, True]
    patience = RetryPolicy(3, (0.0,), 3600.0)  # a pause of zero
    assert not any(over(patience, number, away) for number in range(1, 50))
    assert over(patience, 50, busy)
    assert over(RetryPolicy(1, (1.0,), 0.0), 1, away)


def test_the_last_pause_ends_with_the_waiting() -> None:
    patience = RetryPolicy(1, (1000.0,), 5.0)
    assert 0 < patience.wait(state(1)) <= 5.0


@pytest.mark.parametrize("worth", [True, False])
def test_a_try_is_repeated_only_where_the_caller_says_so(worth: bool) -> None:
    """Check that the last error is raised unchanged if the next attempt would be too late."""
    waits = iter([0.0, 0.0, math.inf])
    attempts: list[int] = []
    deadline = Deadline(3600)

    async def ask() -> None:
        async for attempt in retrying(
            lambda error: worth,
            wait=lambda state: next(waits),
            stop=deadline.is_too_near,
            note=lambda state: None,
        ):
            with attempt:
                attempts.append(attempt.retry_state.attempt_number)
                raise RequestError("unavailable", "away")

    with pytest.raises(RequestError):
        asyncio.run(ask())
    assert attempts == ([1, 2, 3] if worth else [1])


def test_a_try_that_begins_behind_the_deadline_tells_why_the_one_before_failed() -> None:
    """Check a machine that resumes from a suspension after the deadline."""
    deadline = Deadline(3600)
    assert deadline.attempt_timeout_s() > 0

    async def ask() -> None:
        async for attempt in retrying(
            lambda error: True,
            wait=lambda state: 0.0,
            stop=deadline.is_too_near,
            note=lambda state: deadline.extend(-7200),
        ):
            with attempt:
                deadline.attempt_timeout_s()
                raise RequestError("unavailable", "away")

    with pytest.raises(RequestError, match="away"):
        asyncio.run(ask())
    assert Deadline(0).attempt_timeout_s() == 0  # a first attempt ends by its own timeout


@pytest.mark.parametrize(
    ("left_s", "passed_s", "has_failed", "expected"),
    [
        (0.02, 0.03, True, "unavailable: refused"),  # too short to learn anything of the server
        (0.02, 0.01, True, "timeout"),  # the limit of one attempt has ended it, not the deadline
        (5.0, 6.0, True, "timeout"),  # the server had time to answer
        (0.02, 0.03, False, "timeout"),
    ],
)
def test_an_attempt_that_the_deadline_cuts_short_tells_why_the_one_before_failed(
    monkeypatch: Any, left_s: float, passed_s: float, has_failed: bool, expected: str
) -> None:
    now = 0.0
    monkeypatch.setattr("scorekit.net.retry.time.monotonic", lambda: now)
    deadline = Deadline(60)
    if has_failed:
        failed = state(1, RequestError("unavailable", "refused"))
        failed.upcoming_sleep = 60 - left_s
        assert not deadline.is_too_near(failed)
    now = 60 - left_s
    assert deadline.attempt_timeout_s() == pytest.approx(left_s)
    now += passed_s
    assert str(deadline.timeout_error(TimeoutError("timeout"))) == expected


def test_one_seam_stills_every_pause_that_grows(monkeypatch: Any) -> None:
    monkeypatch.setattr("scorekit.net.retry._backoff", lambda state: 42.0)
    assert exponential_wait(state(1)) == 42.0
