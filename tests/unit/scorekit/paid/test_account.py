"""Check prices, the cap, and the totals of a run."""

from __future__ import annotations

import logging

import pytest

from scorekit.errors import UserError
from scorekit.paid.account import Account, ApiUsage
from trainer.search.answer.config import PriceConfig

PRICE = PriceConfig(prompt=1.0, completion=10.0)  # a million tokens


def account(cap: float | None = None, **spent: ApiUsage) -> Account:
    return Account(cap, {"generator": PRICE, "judge": None}, spent)


def used(prompt: int, completion: int = 0) -> ApiUsage:
    return ApiUsage(calls=1, prompt_tokens=prompt, completion_tokens=completion)


def test_tokens_have_their_price_and_what_has_none_is_no_money() -> None:
    counting = account()
    assert counting.count("generator", used(1_000_000, 100_000)).money == pytest.approx(2.0)
    assert counting.count("judge", used(1_000_000, 100_000)).money is None
    totals = counting.totals
    assert totals["generator"].calls == totals["judge"].calls == 1
    assert totals["generator"].money == pytest.approx(2.0) and totals["judge"].money is None


def test_a_call_that_could_pass_the_cap_does_not_fit() -> None:
    capped = account(1.0)
    assert capped.fits(0.6, 0.1, "generator", used(300_000))
    assert not capped.fits(0.6, 0.2, "generator", used(300_000))
    assert capped.fits(0.9, 0.0, "judge", used(10**9, 10**9))  # without a price
    error = capped.refusal({"generator": used(900_000)}, "generator", used(200_000))
    assert isinstance(error, UserError) and "0.9000 of 1.0 is spent" in str(error)


def test_the_last_call_below_the_cap_fits() -> None:
    """Check float rounding: three calls of 0.1 cost 0.30000000000000004."""
    capped = account(0.3)
    assert capped.fits(0.1 + 0.1, 0.1, "generator", used(0))
    assert not capped.fits(0.1 + 0.1, 0.1, "generator", used(1))


def test_running_totals_are_told(caplog: pytest.LogCaptureFixture) -> None:
    logging_account = account(1.0)
    with caplog.at_level(logging.INFO):
        for number in (1, 2, 3):
            calls = ApiUsage(calls=number, prompt_tokens=60_000 * number)
            logging_account.end_call({"generator": calls})
    (line,) = caplog.messages  # at each tenth of the cap
    assert "generator 2 calls, 120,000 + 0 tokens, 0.1200" in line


def test_what_was_spent_before_is_in_the_totals() -> None:
    assert account(1.0, generator=used(600_000)).totals["generator"].money == pytest.approx(0.6)
