"""Limit the concurrent requests and tokens of a paid server.

A run has one limiter, on rank 0, which makes the paid calls for all ranks. `PaidAnswerCache`
refuses a second process of the same run, so no limit and no cap applies twice.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from scorekit.llm.limits import ConcurrencyLimiter


class Limiter:
    """Requests and tokens in flight; first come, first served. Use it in one event loop."""

    def __init__(self, requests: int, tokens: int) -> None:
        self._max_tokens = tokens
        self._in_flight = ConcurrencyLimiter(requests, tokens)

    @property
    def requests(self) -> int:
        """Return the number of requests in flight."""
        return self._in_flight.requests_in_flight

    @property
    def tokens(self) -> int:
        """Return the number of tokens in flight."""
        return self._in_flight.sequences_in_flight

    def hold(self, tokens: int) -> AbstractAsyncContextManager[None]:
        """Wait for capacity for a request of `tokens` tokens.

        A request above the limit is sent alone.
        """
        return self._in_flight.hold(min(tokens, self._max_tokens))
