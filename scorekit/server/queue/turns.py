"""Whose turn it is, `interactive` or `bulk`: at the tokeniser and at the model alike."""

from __future__ import annotations

from scorekit.schemas import Priority


class Turns:
    """`interactive` before `bulk`; but what has waited in bulk for `patience_s` gets every other
    turn, so that steady interactive load never starves it.

    Owner: lock of the queue that it is part of (`Pieces`, `Ready`).
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._bulk_had_last = False

    def order(self, bulk_since: float | None, now: float) -> tuple[Priority, Priority]:
        """Who is next, then who is where that one has nothing. bulk_since: when the oldest bulk
        work came, in monotonic seconds as `now`; None where there is none."""
        aged = bulk_since is not None and now - bulk_since >= self._patience_s
        if aged and not self._bulk_had_last:
            return "bulk", "interactive"
        return "interactive", "bulk"

    def had(self, priority: Priority) -> None:
        """Note who had this turn."""
        self._bulk_had_last = priority == "bulk"
