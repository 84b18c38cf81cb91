"""Pay for equal calls once, whether they are concurrent or a stored answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from scorekit.net.loops import cancel_all
from scorekit.paid.account import Account, ApiUsage, wait_for_event
from scorekit.paid.answers import NO_ANSWER, Claim, ClaimState, Store

T = TypeVar("T")
#: The shortest and the longest pause in seconds between two looks at what other processes do.
_PAUSE_S = (0.02, 0.5)


@dataclass(frozen=True, slots=True)
class Paid:
    """The outcome of a call.

    answer: JSON values.
    error: raised, without an answer, when the usage is stored."""

    usage: ApiUsage
    answer: Any = NO_ANSWER
    error: Exception | None = None


Pay: TypeAlias = Callable[[Any], Awaitable[Paid]]


class PaidCalls:
    """Equal calls at the same time are one call. Use it in one event loop.

    slot: limits the calls in flight, by their max usage.
    deadline_s: max seconds to wait from the start of the call; None: until it ends. A call
    continues when nobody waits for it any more, because it is paid for.
    """

    def __init__(
        self,
        store: Store,
        account: Account,
        *,
        slot: Callable[[ApiUsage], AbstractAsyncContextManager[Any]] = nullcontext,
        deadline_s: float | None = None,
    ) -> None:
        self._store, self._account = store, account
        self._slot, self._deadline_s = slot, deadline_s
        #: Key -> a pending call, and whether it has claim to run.
        self._calls: dict[bytes, tuple[asyncio.Task[tuple[Any, ApiUsage]], asyncio.Event]] = {}

    async def once(
        self, key: bytes, server: str, limit: ApiUsage, pay: Pay
    ) -> tuple[Any, ApiUsage]:
        """Return the answer of a key, and what this caller has just paid for it.

        limit: max usage of the call.
        pay: gets the slot and makes the call.
        Raises what `pay` raises or returns, BudgetExceeded, UserError, TimeoutError at the
        deadline.
        """
        is_first = key not in self._calls
        if is_first:  # no await before it is registered, so equal calls see it
            self._start(key, server, limit, pay)
        task, started = self._calls[key]
        await started.wait()
        async with asyncio.timeout(self._deadline_s):
            answer, usage = await asyncio.shield(task)
        return answer, usage if is_first else ApiUsage(cached=True)

    async def close(self) -> None:
        """Cancel all pending calls."""
        await cancel_all(task for task, _ in self._calls.values())

    def _start(self, key: bytes, server: str, limit: ApiUsage, pay: Pay) -> None:
        started = asyncio.Event()
        task = asyncio.create_task(self._stored_or_paid(key, server, limit, pay, started))
        self._calls[key] = task, started

        def forget(finished: asyncio.Task[tuple[Any, ApiUsage]]) -> None:
            started.set()
            del self._calls[key]
            if not finished.cancelled():
                finished.exception()  # mark the error as retrieved, even without a waiting caller

        task.add_done_callback(forget)

    async def _stored_or_paid(
        self, key: bytes, server: str, limit: ApiUsage, pay: Pay, started: asyncio.Event
    ) -> tuple[Any, ApiUsage]:
        stored = await self._store.get([key])  # a stored answer needs no slot
        if key in stored:
            return stored[key], ApiUsage(cached=True)
        pause_s = _PAUSE_S[0]
        while True:
            async with self._slot(limit) as slot:
                event = self._account.call_event()  # before the claim, so that no end is missed
                claim = await self._begin(key, server, limit)
                if claim.state is ClaimState.OURS:
                    started.set()
                    return await self._pay(key, server, pay, slot)
            if claim.state is ClaimState.ANSWER:
                return claim.answer, ApiUsage(cached=True)
            if claim.state is ClaimState.REFUSED:
                raise self._account.refusal(claim.spent, server, limit)
            await wait_for_event(event, pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def _begin(self, key: bytes, server: str, limit: ApiUsage) -> Claim:
        """Claim a key. A caller that is cancelled meanwhile keeps no claim."""
        claiming = asyncio.ensure_future(self._store.begin(key, server, limit, self._account))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if (await claiming).state is ClaimState.OURS:
                await self._finish(key, server, ApiUsage())
            raise

    async def _pay(self, key: bytes, server: str, pay: Pay, slot: Any) -> tuple[Any, ApiUsage]:
        try:
            paid = await pay(slot)
            usage = self._account.count(server, paid.usage) if paid.usage.calls else paid.usage
        except BaseException:
            await self._finish(key, server, ApiUsage())
            raise
        await self._finish(key, server, usage, paid.answer)
        if paid.error is not None:
            raise paid.error
        return paid.answer, usage

    async def _finish(
        self, key: bytes, server: str, usage: ApiUsage, answer: Any = NO_ANSWER
    ) -> None:
        """End a claim. It also ends if this task is cancelled, and a paid answer is stored."""
        totals: dict[str, ApiUsage] = {}
        try:
            totals = await _complete(self._store.finish(key, server, usage, answer))
        finally:
            self._account.end_call(totals)


async def _complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, which goes on to its end if this task is cancelled."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
