"""The money of a run of several processes: one account below the cap, in the processes' store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import count

from pydantic import BaseModel, Field
from pydantic_core import from_json

from trainer.rl.process_store import ProcessStore
from trainer.search.answer.config import MoneyConfig
from trainer.search.answer.shared_calls import SharedCalls
from trainer.search.answer.spending import (
    BudgetExceeded,
    SpendTracker,
    cost_of,
    priced,
    sum_charges,
)
from trainer.search.records import ApiUsage

#: Seconds between two attempts to reserve money that others have reserved.
_PAUSE_S = (0.02, 0.5)


class Account(BaseModel):
    """Holds what a run has spent and reserved, by server, in calls and tokens.

    in_flight: calls with a reservation. writer: of this version, so that no two are equal.
    """

    spent: dict[str, ApiUsage] = Field(default_factory=dict)
    reserved: dict[str, tuple[int, int]] = Field(default_factory=dict)
    in_flight: int = 0
    writer: str = ""

    def count(self, server: str, charge: ApiUsage) -> None:
        """Add the usage of calls to what is spent."""
        total = sum_charges([self.spent.get(server, ApiUsage()), charge])
        self.spent[server] = priced(total, None)  # readers price it

    def reserve(self, server: str, prompt: int, completion: int, calls: int = 1) -> None:
        """Reserve tokens for a call; negative numbers release them."""
        had = self.reserved.get(server, (0, 0))
        self.reserved[server] = had[0] + prompt, had[1] + completion
        self.in_flight += calls


class SharedAccount:
    """The account of a run in the store of its processes."""

    def __init__(self, store: ProcessStore) -> None:
        self._store, self._number = store, count()

    def open(self, spent: Mapping[str, ApiUsage]) -> None:
        """Write the first version, with what the run has spent before; once, on one process."""
        self._store.set("account", Account(spent=dict(spent)).model_dump_json())

    def change(self, change: Callable[[Account], bool]) -> tuple[Account, bool]:
        """Change the account, and return it with whether `change` has changed it.

        change: is repeated if another process was faster; it returns whether to write its change.
        """
        text = self._store.get("account")
        assert text is not None, "the first process opens it"
        while True:
            account = Account.model_validate(from_json(text))
            if not change(account):
                return account, False
            account.writer = f"{self._store.rank}-{next(self._number)}"
            written = account.model_dump_json()
            current = self._store.replace("account", text, written)
            if current == written:
                return account, True
            text = current


class SharedSpendTracker(SpendTracker):
    """The totals of one process of a run, below the cap of the whole run.

    spent: usage of the run before, on the main process; nothing on the others. So the totals of all
    processes add up to those of the run. The main process logs the totals of the run.
    """

    def __init__(self, cfg: MoneyConfig, spent: Mapping[str, ApiUsage], calls: SharedCalls) -> None:
        super().__init__(cfg, spent)
        self._calls, self._account = calls, SharedAccount(calls.store)

    def count(self, server: str, prompt_tokens: int, completion_tokens: int) -> ApiUsage:
        """Count one call and return its charge."""
        charge = super().count(server, prompt_tokens, completion_tokens)

        def change(account: Account) -> bool:
            account.count(server, charge)
            return True

        self._calls.submit(lambda: self._account.change(change))
        return charge

    @asynccontextmanager
    async def reserved(self, server: str, prompt: int, completion: int) -> AsyncIterator[None]:
        """Reserve money below the cap for a call of at most these tokens, until it is counted.

        If other calls have reserved the money, wait for their end. Raises BudgetExceeded if no call
        of any process is pending.
        """
        max_cost = cost_of(self._prices[server], prompt, completion) or 0.0
        pause = _PAUSE_S[0]

        def take(account: Account) -> bool:
            fits = self._fits(self._priced(account), self._reserved_cost(account), max_cost)
            if fits:
                account.reserve(server, prompt, completion)
            return fits

        def release(account: Account) -> bool:
            account.reserve(server, -prompt, -completion, -1)
            return True

        def undo(change: tuple[Account, bool]) -> None:
            if change[1]:
                self._account.change(release)

        while True:
            account, is_reserved = await self._calls.run(lambda: self._account.change(take), undo)
            if is_reserved:
                break
            if not account.in_flight:
                raise BudgetExceeded(self._refusal(self._priced(account), max_cost))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_S[1])
        try:
            yield
        finally:
            # no await: a cancelled call must not keep its reservation
            released = self._calls.submit(lambda: self._account.change(release))
            if self._calls.rank == 0:
                released.add_done_callback(self._log_account)

    def _log_account(self, changed: Future[tuple[Account, bool]]) -> None:
        if changed.exception() is None:  # else the next call raises it
            self._log_totals(self._priced(changed.result()[0]))

    def _priced(self, account: Account) -> dict[str, ApiUsage]:
        totals = {name: ApiUsage() for name in self._prices} | account.spent
        return {name: priced(usage, self._prices[name]) for name, usage in totals.items()}

    def _reserved_cost(self, account: Account) -> float:
        costs = [cost_of(self._prices[name], *tokens) for name, tokens in account.reserved.items()]
        return sum(cost or 0.0 for cost in costs)
