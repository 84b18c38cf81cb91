"""The order of the priorities `interactive` and `bulk`, at the tokenizer and at the model."""

from __future__ import annotations

from scorekit.schemas import Priority


class PriorityScheduler:
    """`interactive` is served before `bulk`, but bulk work older than `patience_s` gets every other
    turn, so that steady interactive load never starves it.

    Owner: lock of the queue that uses it (`TokenizerQueue`, `ModelQueue`).
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._bulk_had_last = False

    def next_priorities(self, bulk_since: float | None, now: float) -> tuple[Priority, Priority]:
        """Return the priorities in the order to try.

        bulk_since: start of the oldest bulk work, in monotonic seconds as `now`; None without
        any."""
        is_overdue = bulk_since is not None and now - bulk_since >= self._patience_s
        if is_overdue and not self._bulk_had_last:
            return "bulk", "interactive"
        return "interactive", "bulk"

    def record_served(self, priority: Priority) -> None:
        """Note which priority was served."""
        self._bulk_had_last = priority == "bulk"
