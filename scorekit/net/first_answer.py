"""Limit how long a client waits for a server that has never answered: its URL may be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from tenacity import RetryCallState

from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.interrupts import is_interactive
from scorekit.net.retry import Deadline, failure_of

#: Seconds in which somebody who watches should hear that nothing answers.
INTERACTIVE_S = 10.0


def first_answer_limit_s(first_answer_s: float | None) -> float:
    """Return the seconds to wait for a first answer, without a limit if nobody sits there.

    first_answer_s: what the caller has set; None: nothing."""
    if first_answer_s is not None:
        return first_answer_s
    return INTERACTIVE_S if is_interactive() else math.inf


class FirstAnswer:
    """Limits the retries of requests to a server that has not answered yet.

    A refusal is an answer, too: a service that loads its model is waited for.

    limit_s: seconds from the first attempt of a request; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._deadline: Deadline | None = None
        self._has_answered = self._limit_s == math.inf

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Start the limit for the request in this block, and name it in the error at its end."""
        if self._has_answered:
            yield
            return
        deadline = self._deadline = Deadline(self._limit_s)
        try:
            yield
        except ServiceUnreachable as error:
            if not error.retryable or self._has_answered:
                raise
            raise ServiceUnreachable(
                error.url,
                f"{error.reason}. Nothing answers there since {deadline.seconds:g} s: start the "
                "service, or correct the URL (first_answer_s sets how long to wait)",
            ) from None
        self._has_answered = True

    def is_overdue(self, state: RetryCallState) -> bool:
        """Return True if the next attempt would be after the limit."""
        if isinstance(failure_of(state), RequestError):
            self._has_answered = True
        deadline = self._deadline
        return not self._has_answered and deadline is not None and deadline.is_too_near(state)
