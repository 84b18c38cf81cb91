"""The two types of stages, and running one with a clear error."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, ClassVar

from scorekit.errors import ScorekitError
from synth.config import SynthConfig
from synth.context import Stage, StageContext
from synth.execution.clients import Clients
from synth.record import KeptRecord, RejectedRecord
from synth.storage.store import Record, StageFolder


class MapStage(Stage):
    """A stage of one record at a time. services: those that it calls: of "teacher", "metricx",
    "judge"."""

    services: ClassVar[frozenset[str]] = frozenset()

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """Return the services that it calls under this config."""
        return self.services

    @abstractmethod
    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Process a record, as a function of it and of the services' answers."""


class GlobalStage(Stage):
    """A stage that needs all records at once. It writes its shards, marks and manifest.

    runs_alone: one process runs it after the previous stage; else the stage itself shares the work
    among several processes.
    """

    runs_alone: ClassVar[bool] = True

    @abstractmethod
    def run(self, ctx: StageContext, manifest: dict[str, Any]) -> None:
        """Run the full stage. manifest: its settings, which it writes with its shards."""

    def verify(self, folder: StageFolder) -> None:
        """Raise UserError if files of the finished stage have changed."""
        folder.verify_marks()
        for index in range(folder.shards() or 0):
            folder.verify(index)


def run_async(work: Any) -> None:
    """Run a coroutine; raise the error that ended a task group instead of the group."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            own_errors = [e for e in error.exceptions if isinstance(e, ScorekitError)]
            error = (own_errors or error.exceptions)[0]
        raise error from None
