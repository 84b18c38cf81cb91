"""Prices, totals and cap of the paid calls of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from scorekit.errors import UserError
from scorekit.numeric import above

log = logging.getLogger(__name__)
#: The running total is logged after this share of the cap, or after this number of calls.
_LOG_SHARE, _LOG_CALLS = 0.1, 500
#: The last line of an estimate of a command that stores its answers.
STORED_ARE_FREE = "answers in the file of answers cost nothing"


class ApiUsage(BaseModel):
    """The usage of a paid server.

    money: cost in the currency of the prices; None without prices.
    cached: the answer was stored, at no cost."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float | None = None
    cached: bool = False


class Price(Protocol):
    """The price of a million tokens."""

    prompt: float
    completion: float


class AnswerLimits(Protocol):
    """The settings of a model that limit the usage of a call."""

    max_output_tokens: int
    tokens_per_image: int


class BudgetExceeded(UserError):
    """The next call could exceed the cap: the run ends with a checkpoint."""


def cost_of(price: Price | None, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the cost of tokens; None without a price."""
    if price is None:
        return None
    return (price.prompt * prompt_tokens + price.completion * completion_tokens) / 1e6


def priced(usage: ApiUsage, price: Price | None) -> ApiUsage:
    """Return a usage with its cost."""
    money = cost_of(price, usage.prompt_tokens, usage.completion_tokens)
    return usage.model_copy(update={"money": money})


def sum_charges(charges: Iterable[ApiUsage]) -> ApiUsage:
    """Return the sum of usages; its cost counts those with a price."""
    addends = list(charges)
    paid = [charge.money for charge in addends if charge.money is not None]
    return ApiUsage(
        calls=sum(charge.calls for charge in addends),
        prompt_tokens=sum(charge.prompt_tokens for charge in addends),
        completion_tokens=sum(charge.completion_tokens for charge in addends),
        money=sum(paid) if paid else None,
    )


def max_usage(cfg: AnswerLimits, words: int, num_images: int = 0, calls: int = 1) -> ApiUsage:
    """Return the max usage of equal calls of a model: an answer counts `max_output_tokens`.

    words: max tokens of the texts of one call.
    num_images: its images, `tokens_per_image` each.
    """
    return ApiUsage(
        calls=calls,
        prompt_tokens=calls * (words + num_images * cfg.tokens_per_image),
        completion_tokens=calls * cfg.max_output_tokens,
    )


def planned_charges(
    calls: Mapping[str, Iterable[ApiUsage]], prices: Mapping[str, Price | None]
) -> dict[str, ApiUsage]:
    """Return the sum of planned calls of each server, with its cost."""
    return {name: priced(sum_charges(usages), prices[name]) for name, usages in calls.items()}


def format_totals(totals: Mapping[str, ApiUsage]) -> str:
    """Return totals as text for a log."""
    parts = []
    for server, charge in totals.items():
        tokens = f"{charge.prompt_tokens:,} + {charge.completion_tokens:,} tokens"
        money = "no price" if charge.money is None else f"{charge.money:.4f}"
        parts.append(f"{server} {charge.calls:,} calls, {tokens}, {money}")
    return "; ".join(parts)


class Account:
    """Prices, the cap of a run, and the totals of this process by server. Use it in one event loop.

    spent: usage of the run before this process; nothing on its further processes, so the totals of
    all add up to those of the run.
    unfinished: calls that a kill has cut off; a server may charge for them, and the cap does not
    know. Totals count answered calls, with the tokens that servers report.
    is_logging: whether the totals of the run are logged here.
    """

    def __init__(
        self,
        cap: float | None,
        prices: Mapping[str, Price | None],
        spent: Mapping[str, ApiUsage] = MappingProxyType({}),
        unfinished: Mapping[str, ApiUsage] = MappingProxyType({}),
        *,
        is_logging: bool = True,
    ) -> None:
        self.cap, self.prices, self._is_logging = cap, dict(prices), is_logging
        self._totals = {name: ApiUsage() for name in prices} | self._price(spent)
        self._logged = sum_charges(self._totals.values())
        self._call_ended = asyncio.Event()
        if unfinished:
            log.warning(
                "calls without an answer when the run was killed, at limit: %s; they are asked "
                "again, and a server may have charged for them",
                format_totals(self._price(unfinished)),
            )

    @property
    def totals(self) -> dict[str, ApiUsage]:
        """Return the usage of the run by server."""
        return dict(self._totals)

    def count(self, server: str, usage: ApiUsage) -> ApiUsage:
        """Count the usage of a call and return it with its cost."""
        charge = priced(usage, self.prices[server])
        self._totals[server] = sum_charges([self._totals[server], charge])
        return charge

    def cost(self, totals: Mapping[str, ApiUsage]) -> float:
        """Return the cost of totals by server; what has no price costs nothing."""
        return sum_charges(self._price(totals).values()).money or 0.0

    def fits(self, spent: float, reserved: float, server: str, limit: ApiUsage) -> bool:
        """Return whether a call of at most this usage fits below the cap."""
        total = spent + reserved + self.cost({server: limit})
        return self.cap is None or not above(total, self.cap)

    def refusal(
        self, spent: Mapping[str, ApiUsage], server: str, limit: ApiUsage
    ) -> BudgetExceeded:
        """Return the error of a call that does not fit.

        spent: totals of the run.
        """
        return BudgetExceeded(
            f"money.cap: {self.cost(spent):.4f} of {self.cap} is spent, and the next call may cost "
            f"{self.cost({server: limit}):.4f}. Raise the cap (paid answers stay stored)."
        )

    def call_event(self) -> asyncio.Event:
        """Return an event that is set when a call of this process ends."""
        return self._call_ended

    def end_call(self, totals: Mapping[str, ApiUsage]) -> None:
        """Wake who waits for the money of a call, and log the totals of the run at times."""
        self._call_ended.set()
        self._call_ended = asyncio.Event()
        if not self._is_logging or not totals:
            return
        run_totals = {name: ApiUsage() for name in self.prices} | self._price(totals)
        current, logged = sum_charges(run_totals.values()), self._logged
        growth = (current.money or 0.0) - (logged.money or 0.0)
        by_money = self.cap is not None and growth >= _LOG_SHARE * self.cap
        if by_money or current.calls - logged.calls >= _LOG_CALLS:
            self._logged = current
            log.info("paid servers so far: %s", format_totals(run_totals))

    def _price(self, totals: Mapping[str, ApiUsage]) -> dict[str, ApiUsage]:
        return {name: priced(usage, self.prices.get(name)) for name, usage in totals.items()}


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
