"""Track what a run spends: prices, running totals, and a cap that no call exceeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from scorekit.errors import UserError
from scorekit.numeric.thresholds import above
from trainer.search.answer.config import ChatModelConfig, MoneyConfig, PriceConfig
from trainer.search.records import ApiUsage

log = logging.getLogger(__name__)
#: The running total is logged after this share of the cap, or after this number of calls.
_LOG_SHARE, _LOG_CALLS = 0.1, 500
#: The last line of an estimate of a command that stores its answers.
STORED_ARE_FREE = "answers in the file of answers cost nothing"


class BudgetExceeded(UserError):
    """The next call could exceed the cap: the run ends with a checkpoint."""


def cost_of(price: PriceConfig | None, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the cost of tokens; None without a price."""
    if price is None:
        return None
    return (price.prompt * prompt_tokens + price.completion * completion_tokens) / 1e6


def priced(charge: ApiUsage, price: PriceConfig | None) -> ApiUsage:
    """Return a charge with its cost."""
    money = cost_of(price, charge.prompt_tokens, charge.completion_tokens)
    return charge.model_copy(update={"money": money})


def sum_charges(charges: Iterable[ApiUsage]) -> ApiUsage:
    """Return the sum of charges; its cost counts those with a price."""
    addends = list(charges)
    paid = [charge.money for charge in addends if charge.money is not None]
    return ApiUsage(
        calls=sum(charge.calls for charge in addends),
        prompt_tokens=sum(charge.prompt_tokens for charge in addends),
        completion_tokens=sum(charge.completion_tokens for charge in addends),
        money=sum(paid) if paid else None,
    )


def max_usage(cfg: ChatModelConfig, words: int, num_images: int = 0, calls: int = 1) -> ApiUsage:
    """Return the max usage of equal calls of a model: an answer counts `max_output_tokens`.

    words: max tokens of the texts of one call. num_images: its images, `tokens_per_image` each.
    """
    return ApiUsage(
        calls=calls,
        prompt_tokens=calls * (words + num_images * cfg.tokens_per_image),
        completion_tokens=calls * cfg.max_output_tokens,
    )


def planned_charges(
    calls: Mapping[str, Iterable[ApiUsage]], prices: Mapping[str, PriceConfig | None]
) -> dict[str, ApiUsage]:
    """Return the sum of planned calls of each server, with its cost."""
    return {name: priced(sum_charges(usages), prices[name]) for name, usages in calls.items()}


class SpendTracker:
    """The totals of one run, by server ("generator", "judge", others). Use it in one event loop.

    spent: usage of the run before this process, from the file of answers. other_prices: further
    servers and their prices. Totals count answered calls, with the tokens that servers report. What
    a server charges for an aborted call is unknown.
    """

    def __init__(
        self,
        cfg: MoneyConfig,
        spent: Mapping[str, ApiUsage],
        other_prices: Mapping[str, PriceConfig | None] = MappingProxyType({}),
    ) -> None:
        self._cap = cfg.cap
        self._prices = {"generator": cfg.generator, "judge": cfg.judge, **other_prices}
        self._totals = {name: ApiUsage() for name in self._prices}
        self._reserved, self._in_flight = 0.0, 0
        self._freed = asyncio.Condition()
        for server, charge in spent.items():
            self._add(server, charge)
        self._logged = sum_charges(self._totals.values())

    @property
    def totals(self) -> dict[str, ApiUsage]:
        """Return the usage of the run by server."""
        return dict(self._totals)

    def count(self, server: str, prompt_tokens: int, completion_tokens: int) -> ApiUsage:
        """Count one call and return its charge."""
        charge = ApiUsage(calls=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return self._add(server, charge)

    def _add(self, server: str, charge: ApiUsage) -> ApiUsage:
        charge = priced(charge, self._prices[server])
        self._totals[server] = sum_charges([self._totals[server], charge])
        return charge

    @asynccontextmanager
    async def reserved(self, server: str, prompt: int, completion: int) -> AsyncIterator[None]:
        """Reserve money below the cap for a call of at most these tokens, until it is counted.

        If other calls have reserved the money, wait for their end: most cost less than reserved.
        Raises BudgetExceeded if no call is pending.
        """
        max_cost = cost_of(self._prices[server], prompt, completion) or 0.0
        async with self._freed:
            while not self._fits(self._totals, self._reserved, max_cost):
                if not self._in_flight:
                    raise BudgetExceeded(self._refusal(self._totals, max_cost))
                await self._freed.wait()
            self._reserved, self._in_flight = self._reserved + max_cost, self._in_flight + 1
        try:
            yield
        finally:
            # no await before this release: a cancelled call must not keep its reservation
            self._in_flight -= 1
            self._reserved = self._reserved - max_cost if self._in_flight else 0.0
            self._log_totals(self._totals)
            async with self._freed:
                self._freed.notify_all()

    def _fits(self, totals: Mapping[str, ApiUsage], reserved: float, max_cost: float) -> bool:
        spent = sum_charges(totals.values()).money or 0.0
        return self._cap is None or not above(spent + reserved + max_cost, self._cap)

    def _refusal(self, totals: Mapping[str, ApiUsage], max_cost: float) -> str:
        spent = sum_charges(totals.values()).money or 0.0
        return (
            f"money.cap: {spent:.4f} of {self._cap} is spent, and the next call may cost "
            f"{max_cost:.4f}. Raise the cap (paid answers stay stored)."
        )

    def _log_totals(self, totals: Mapping[str, ApiUsage]) -> None:
        current, logged = sum_charges(totals.values()), self._logged
        growth = (current.money or 0.0) - (logged.money or 0.0)
        by_money = self._cap is not None and growth >= _LOG_SHARE * self._cap
        if by_money or current.calls - logged.calls >= _LOG_CALLS:
            self._logged = current
            log.info("paid servers so far: %s", format_totals(totals))


def format_totals(totals: Mapping[str, ApiUsage]) -> str:
    """Return totals as text for a log."""
    parts = []
    for server, charge in totals.items():
        tokens = f"{charge.prompt_tokens:,} + {charge.completion_tokens:,} tokens"
        money = "no price" if charge.money is None else f"{charge.money:.4f}"
        parts.append(f"{server} {charge.calls:,} calls, {tokens}, {money}")
    return "; ".join(parts)
