"""Results that came before those of the lines in front of them.

An output is in the order of its input. What a run would lose of it if it were killed stands in
OUT.early until its turn has come, a JSON line each, as it will stand in the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from scorekit.errors import may_pass_later
from scorekit.files import write_atomic

#: Seconds between two saves: what a run that is killed loses at most.
SAVE_S = 2.0


class EarlyResult(NamedTuple):
    """A line of the output, read and as it stands there."""

    fields: Mapping[str, Any]
    raw: bytes


class EarlyResults:
    """By the number of their line. path: where they are saved; None: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: dict[int, EarlyResult] = {}
        self._changed = False
        self._when_first: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def when_first(self, act: Callable[[], None]) -> None:
        """Have `act` called before the first result is there, or at the end."""
        self._when_first = act

    def put(self, fields: Mapping[str, Any]) -> None:
        """Keep a result until it is taken. fields: with its `line`."""
        self._first()
        self._records[fields["line"]] = EarlyResult(fields, to_json(fields) + b"\n")
        self._changed = True

    def take(self, number: int) -> EarlyResult:
        """The result of a line, which is the output's from now on."""
        return self._records.pop(number)

    def load(self, after: int) -> None:
        """Take up what an earlier run has saved of the lines behind number `after`; what failed for
        the moment is asked again."""
        if self._path is None or not self._path.exists():
            return
        for raw in self._path.read_bytes().splitlines(keepends=True):
            fields = from_json(raw)
            for_now = not fields["ok"] and may_pass_later(fields["error"])
            if fields["line"] > after and not for_now:
                self._records[fields["line"]] = EarlyResult(fields, raw)

    def save(self) -> None:
        """Write what is new since it was saved before."""
        if self._changed and self._path is not None:
            self._changed = False
            write_atomic(self._path, b"".join(r.raw for r in self._records.values()), alone=True)

    def finish(self) -> None:
        """The output has them all."""
        self._first()
        self._records.clear()
        self._changed = False
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Save every `SAVE_S` seconds, and at the end, however it ends."""
        timer = asyncio.create_task(self._save_again_and_again())
        try:
            yield
        finally:
            timer.cancel()
            await asyncio.gather(timer, return_exceptions=True)
            self.save()

    def _first(self) -> None:
        act, self._when_first = self._when_first, None
        if act is not None:
            act()

    async def _save_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.save()
