"""How much may be asked of a paid server at one time.

A run has one of these, in the process that asks for it: rank 0, to which the other ranks hand their
episodes. `PaidAnswers` refuses a second process of the same run, so that no limit and no cap is
counted twice.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from scorekit.llm.pacing import InFlight


class Limiter:
    """Requests and tokens in flight; first come, first served. Use it in one event loop."""

    def __init__(self, requests: int, tokens: int) -> None:
        self._most_tokens = tokens
        self._in_flight = InFlight(requests, tokens)

    @property
    def requests(self) -> int:
        """In flight now."""
        return self._in_flight.requests_in_flight

    @property
    def tokens(self) -> int:
        """In flight now."""
        return self._in_flight.sequences_in_flight

    def hold(self, tokens: int) -> AbstractAsyncContextManager[None]:
        """A place for one request of about so many tokens; one that is larger than all of the room
        goes out alone."""
        return self._in_flight.hold(min(tokens, self._most_tokens))
