"""Pay for equal calls once, whether they are concurrent or a stored answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel

from scorekit.net.tasks import cancel_all
from trainer.search.answer.answer_cache import PaidAnswerCache
from trainer.search.records import ApiUsage

T = TypeVar("T", bound=BaseModel)
Pay: TypeAlias = Callable[[Callable[[], None]], Coroutine[Any, Any, tuple[T, ApiUsage]]]


class PaidCalls(Generic[T]):
    """Equal calls at the same time are one call. Use it in one event loop.

    answer_type: of the stored answers. deadline_s: max seconds to wait from the start of the call;
    None: until it ends. A call continues when nobody waits for it any more, because it is paid for.
    """

    def __init__(
        self,
        answer_type: type[T],
        paid_answers: PaidAnswerCache,
        deadline_s: float | None = None,
    ) -> None:
        self._answer_type, self._paid_answers = answer_type, paid_answers
        self._deadline_s = deadline_s
        #: Key -> a pending call, and whether it has begun to run.
        self._calls: dict[bytes, tuple[asyncio.Task[tuple[T, ApiUsage]], asyncio.Event]] = {}

    async def get(self, key: bytes, pay: Pay[T]) -> tuple[T, ApiUsage]:
        """Return the answer of a key, and what this caller has just paid for it.

        pay: gets a function to call at its start; returns the answer, which it has stored, and its
        usage. Raises what `pay` raises, TimeoutError at the deadline.
        """
        is_first = key not in self._calls
        if is_first:  # no await before it is registered, so equal calls see it
            self._start(key, pay)
        task, started = self._calls[key]
        await started.wait()
        async with asyncio.timeout(self._deadline_s):
            answer, charge = await asyncio.shield(task)
        return answer, charge if is_first else ApiUsage(cached=True)

    def _start(self, key: bytes, pay: Pay[T]) -> None:
        started = asyncio.Event()
        task = asyncio.create_task(self._stored_or_paid(key, pay, started.set))
        self._calls[key] = task, started

        def forget(finished: asyncio.Task[tuple[T, ApiUsage]]) -> None:
            started.set()
            del self._calls[key]
            if not finished.cancelled():
                finished.exception()  # mark the error as retrieved, even without a waiting caller

        task.add_done_callback(forget)

    async def _stored_or_paid(
        self, key: bytes, pay: Pay[T], turn: Callable[[], None]
    ) -> tuple[T, ApiUsage]:
        async with self._paid_answers.claimed(key) as stored:
            if stored is not None:
                return self._answer_type.model_validate(stored), ApiUsage(cached=True)
            return await pay(turn)

    async def close(self) -> None:
        """Cancel all pending calls."""
        await cancel_all(task for task, _ in self._calls.values())
