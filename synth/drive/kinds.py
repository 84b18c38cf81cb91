"""The two kinds of stages, and how one that fails in a group tells."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, ClassVar

from scorekit.errors import ScorekitError
from synth.config import SynthConfig
from synth.context import Context, Stage
from synth.drive.clients import Clients
from synth.folder.store import Record, StageFolder
from synth.record import Kept, Rejected


class MapStage(Stage):
    """A stage of one record at a time."""

    @abstractmethod
    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """Whom it asks: of "teacher", "metricx", "judge"."""

    @abstractmethod
    async def process(self, record: Record, clients: Clients) -> Kept | Rejected:
        """What becomes of a record: a function of it and of what the services answer."""


class WholeStage(Stage):
    """A stage that has to see all records. It writes its shards, marks and manifest.

    runs_alone: one process runs it, when the stage before it is done; else several share it, and it
    sees to that itself.
    """

    runs_alone: ClassVar[bool] = True

    @abstractmethod
    def run(self, ctx: Context, manifest: dict[str, Any]) -> None:
        """Make all of it. manifest: what it was begun with, which it writes with its shards."""

    def verify(self, folder: StageFolder) -> None:
        """Raise UserError where something of a finished stage is not what was written."""
        folder.verify_all()


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
