"""What a run spends: prices, running totals, and a cap that no call passes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from scorekit.errors import UserError
from scorekit.numeric.thresholds import above
from trainer.search.answer.config import MoneyConfig, PriceConfig
from trainer.search.records import Charge

log = logging.getLogger(__name__)
#: The running total is told whenever it has grown by this share of the cap, or by so many calls.
_TOLD_SHARE, _TOLD_CALLS = 0.1, 500


class MoneySpent(UserError):
    """The next call could pass the cap: the run ends, with its checkpoint."""


def money_of(price: PriceConfig | None, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Of so many tokens; None without a price."""
    if price is None:
        return None
    return (price.prompt * prompt_tokens + price.completion * completion_tokens) / 1e6


def together(charges: Mapping[str, Charge]) -> Charge:
    """The sum of charges; its money is that of those that have a price."""
    paid = [charge.money for charge in charges.values() if charge.money is not None]
    return Charge(
        calls=sum(charge.calls for charge in charges.values()),
        prompt_tokens=sum(charge.prompt_tokens for charge in charges.values()),
        completion_tokens=sum(charge.completion_tokens for charge in charges.values()),
        money=sum(paid) if paid else None,
    )


class Money:
    """The totals of one run, by server ("generator", "judge", others). Use it in one event loop.

    spent: what the run had spent before, as the file of answers says. others: further servers and
    their prices. Totals are of calls that were answered, as the servers count tokens; what a server
    charges for one that it, or we, broke off nobody knows here.
    """

    def __init__(
        self,
        cfg: MoneyConfig,
        spent: Mapping[str, Charge],
        others: Mapping[str, PriceConfig | None] = MappingProxyType({}),
    ) -> None:
        self._cap = cfg.cap
        self._prices = {"generator": cfg.generator, "judge": cfg.judge, **others}
        self._totals = {name: Charge() for name in self._prices}
        self._reserved, self._in_flight = 0.0, 0
        self._freed = asyncio.Condition()
        for server, charge in spent.items():
            self._add(server, charge)
        self._told = together(self._totals)

    @property
    def totals(self) -> dict[str, Charge]:
        """By server, since the run began."""
        return dict(self._totals)

    def count(self, server: str, prompt_tokens: int, completion_tokens: int) -> Charge:
        """Count one call, and give its charge."""
        charge = Charge(calls=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return self._add(server, charge)

    def _add(self, server: str, charge: Charge) -> Charge:
        used = charge.prompt_tokens, charge.completion_tokens
        priced = charge.model_copy(update={"money": money_of(self._prices[server], *used)})
        self._totals[server] = together({"before": self._totals[server], "now": priced})
        return priced

    @asynccontextmanager
    async def reserved(self, server: str, prompt: int, completion: int) -> AsyncIterator[None]:
        """Room below the cap for a call of at most so many tokens, until it has been counted.

        Where others in flight have taken the room, their end is waited for: most cost less than
        they might. Raises MoneySpent where nobody is left to wait for.
        """
        most = money_of(self._prices[server], prompt, completion) or 0.0
        async with self._freed:
            while not self._fits(most):
                if not self._in_flight:
                    raise MoneySpent(self._refusal(most))
                await self._freed.wait()
            self._reserved, self._in_flight = self._reserved + most, self._in_flight + 1
        try:
            yield
        finally:
            # no await before the room is given back: a cancelled call must not keep it
            self._in_flight -= 1
            self._reserved = self._reserved - most if self._in_flight else 0.0
            self._tell()
            async with self._freed:
                self._freed.notify_all()

    def _fits(self, most: float) -> bool:
        spent = together(self._totals).money or 0.0
        return self._cap is None or not above(spent + self._reserved + most, self._cap)

    def _refusal(self, most: float) -> str:
        spent = together(self._totals).money or 0.0
        return (
            f"money.cap: {spent:.4f} of {self._cap} is spent, and the next call may cost "
            f"{most:.4f}: raise it (answers that were paid for are kept)"
        )

    def _tell(self) -> None:
        now, before = together(self._totals), self._told
        grown = (now.money or 0.0) - (before.money or 0.0)
        by_money = self._cap is not None and grown >= _TOLD_SHARE * self._cap
        if by_money or now.calls - before.calls >= _TOLD_CALLS:
            self._told = now
            log.info("paid servers so far: %s", told(self._totals))


def told(totals: Mapping[str, Charge]) -> str:
    """Totals in words, for a log."""
    parts = []
    for server, charge in totals.items():
        tokens = f"{charge.prompt_tokens:,} + {charge.completion_tokens:,} tokens"
        money = "no price" if charge.money is None else f"{charge.money:.4f}"
        parts.append(f"{server} {charge.calls:,} calls, {tokens}, {money}")
    return "; ".join(parts)
