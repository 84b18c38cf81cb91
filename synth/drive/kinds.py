"""The two kinds of stages, and how one that fails in a group tells."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from scorekit.errors import ScorekitError
from synth.config import SynthConfig
from synth.context import Context, Stage
from synth.drive.clients import Clients
from synth.folder.store import Record
from synth.record import Kept, Rejected


class MapStage(Stage, Protocol):
    """A stage of one record at a time. uses: of "teacher", "metricx", "judge"."""

    def uses(self, cfg: SynthConfig) -> frozenset[str]: ...

    async def process(self, record: Record, clients: Clients) -> Kept | Rejected: ...


class WholeStage(Stage, Protocol):
    """A stage that has to see all records. It writes its shards, marks and manifest."""

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None: ...


def run_async(work: Any) -> None:
    """asyncio.run, with the one error that ended a group in place of the group."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            known = [e for e in error.exceptions if isinstance(e, ScorekitError)]
            error = (known or error.exceptions)[0]
        raise error from None
