"""Results that arrived before those of earlier lines.

The output has the order of the input. Results that a killed run would lose are saved in OUT.early
until it is their turn, one JSON line each, as it will be in the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from scorekit.errors import is_transient
from scorekit.files import write_atomic
from scorekit.net.loops import cancel_all

#: Seconds between two saves: the most work that a killed run loses.
SAVE_S = 2.0


class EarlyResult(NamedTuple):
    """A line of the output, parsed and as raw bytes."""

    fields: Mapping[str, Any]
    raw: bytes


class EarlyResults:
    """Early results by line number. path: file to save them to; None: they are not saved."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: dict[int, EarlyResult] = {}
        self._changed = False
        self._on_first: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def when_first(self, act: Callable[[], None]) -> None:
        """Set a function that is called before the first result is added, or at the end."""
        self._on_first = act

    def put(self, fields: Mapping[str, Any]) -> None:
        """Store a result until it is taken. fields: with its `line`."""
        self._call_on_first()
        self._records[fields["line"]] = EarlyResult(fields, to_json(fields) + b"\n")
        self._changed = True

    def take(self, number: int) -> EarlyResult:
        """Return and remove the result of a line, for the output."""
        return self._records.pop(number)

    def load(self, after: int) -> None:
        """Load what an earlier run saved for the lines after number `after`, but not transient
        errors, which are retried."""
        if self._path is None or not self._path.exists():
            return
        for raw in self._path.read_bytes().splitlines(keepends=True):
            fields = from_json(raw)
            should_retry = not fields["ok"] and is_transient(fields["error"])
            if fields["line"] > after and not should_retry:
                self._records[fields["line"]] = EarlyResult(fields, raw)

    def save(self) -> None:
        """Write the results if they changed since the last save."""
        if self._changed and self._path is not None:
            self._changed = False
            write_atomic(self._path, b"".join(r.raw for r in self._records.values()), alone=True)

    def finish(self) -> None:
        """Delete the saved results, because the output has them all."""
        self._call_on_first()
        self._records.clear()
        self._changed = False
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Save every `SAVE_S` seconds, and at the end of the block, also after an error."""
        timer = asyncio.create_task(self._save_periodically())
        try:
            yield
        finally:
            await cancel_all([timer])
            self.save()

    def _call_on_first(self) -> None:
        act, self._on_first = self._on_first, None
        if act is not None:
            act()

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.save()
