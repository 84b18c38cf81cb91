"""Run a map stage over its shards: skip finished ones, process the others, write and mark them.

A stage is a function of a record and of answers, which are cached under a key of everything that
they depend on. So a run that was killed requests nothing twice: it processes the shard's records
again, reads their cached answers, and writes the same bytes. A record without an answer because of
a service failure leaves its shard open; the shard is processed again later.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, MutableSequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any

import structlog

from scorekit.errors import ScorekitError, UserError
from scorekit.locks import RETRY_S, hold_locks, release
from synth.execution.clients import Clients
from synth.execution.services import open_clients
from synth.execution.stage import MapStage, StageIncomplete, StageProgress, StageWork
from synth.execution.stage_start import check_begun
from synth.record import DeferredRecord, KeptRecord, RejectedRecord, TemporaryFailure
from synth.storage.shares import ShardShare, WorkClaims
from synth.storage.store import Record, ShardWriter, StageFolder, read_records

log = structlog.get_logger()

#: Number of concurrent shards. The next one starts when all records of the last one are in flight,
#: so that a few slow answers do not leave requests unused.
SHARDS_AT_ONCE = 32
#: Number of results, per record in flight, that can wait for an older record: one slow answer must
#: not stop all others.
AHEAD = 32


async def run_map_stage(
    stage: MapStage,
    manifest: dict[str, Any],
    work: StageWork,
    left_open: MutableSequence[int] | None = None,
) -> None:
    """Run this process's share of a stage's shards.

    left_open: by shard, 1 if a process of this call has left records open; the others skip it.
    Raises UserError if an input is missing, StageIncomplete if records are left open.
    """
    source, folder, progress = stage.input_of(work.out_dirs), work.folder, work.progress
    with hold_locks([(source.lock(), True), (folder.lock(), True)], "work there"):
        check_begun(folder, source, manifest)
        shards = source.shards() or 0
        if folder.shards() is None:
            folder.set_manifest({**manifest, "shards": shards})
        plan = list(_plan(source, folder, shards, work.share, work.limit))
        total = sum(records for _, records, done in plan)
        progress.advance(sum(records for _, records, done in plan if done), total)
        todo = {index: records for index, records, done in plan if not done}
        if not todo:
            return  # no service is needed, and maybe none is running

        def is_done(index: int) -> bool:
            skipped = left_open is not None and left_open[index]
            return bool(skipped) or folder.mark(index) is not None

        claims = WorkClaims(todo, is_done, folder.lock)
        announce = progress.print_line if left_open is None else None
        async with open_clients(
            work.cfg,
            stage.uses(work.cfg),
            folder,
            progress.stats,
            give_up=work.give_up,
            print_line=progress.print_line,
        ) as clients:
            window = asyncio.Semaphore(clients.window)
            slots = asyncio.Semaphore(SHARDS_AT_ONCE)
            async with asyncio.TaskGroup() as group:
                await slots.acquire()
                async for index, lock in _claimed_shards(claims, stage.name, announce):
                    shard = _Shard(
                        stage, source, folder, index, todo[index], clients, window, progress
                    )
                    group.create_task(_run(shard, lock, slots, left_open))
                    await shard.in_work.wait()
                    await slots.acquire()
    if progress.stats.open:
        raise StageIncomplete(stage.name, progress.stats.open)


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


def _plan(
    source: StageFolder, folder: StageFolder, shards: int, share: ShardShare, limit: int | None
) -> Iterator[tuple[int, int, bool]]:
    """Yield (shard, number of records to take, is done) for the shards to process.

    Raises UserError if a finished shard or its input has changed."""
    remaining = limit
    candidates = share.candidates(shards)
    for index in range(shards):
        if remaining is None and index not in candidates:
            continue  # another machine may not have finished it
        mark = source.mark(index)
        if mark is None:
            raise UserError(f"{source.path}: shard {index} is not done. Resume that stage first")
        records = mark["records"] if remaining is None else min(mark["records"], remaining)
        remaining = None if remaining is None else remaining - records
        if index not in candidates:
            continue
        finished_mark = folder.mark(index)
        if finished_mark is not None:
            if finished_mark["input"] != mark["digest"]:
                raise UserError(
                    f"{folder.path}: shard {index} was made from another {source.name}; "
                    "give --overwrite"
                )
            folder.verify(index)
        elif mark.get("let_go"):  # report it before calling a service
            raise UserError(
                f"{folder.path}: shard {index} is not done, and its input records were deleted: "
                f"`run --stage {folder.name} --repair {index}` makes both again from the kept "
                f"answers, `run --stage {source.name} --overwrite` all shards of both"
            )
        yield index, records, finished_mark is not None


async def _claimed_shards(
    claims: WorkClaims, name: str, announce: Callable[[str], None] | None
) -> AsyncIterator[tuple[int, IO[str]]]:
    """Yield (shard, its lock) until all shards are done or running in this process.

    announce: called with a line when it waits; None: it waits for a process of the same call.
    """
    is_announced = False
    while claims.left:
        claimed = claims.next()
        if claimed is not None:
            yield claimed
        elif claims.left:
            if not is_announced and announce is not None:
                is_announced = True
                announce(f"{name}: waits for {claims.waits_for()}, which is at the last shards")
            await asyncio.sleep(RETRY_S)


async def _run(
    shard: _Shard,
    lock: IO[str],
    slots: asyncio.Semaphore,
    left_open: MutableSequence[int] | None,
) -> None:
    try:
        await shard.run()
        if shard.open and left_open is not None:
            left_open[shard.index] = 1
    finally:
        release(shard.folder.lock(shard.index), lock)
        slots.release()


@dataclass(slots=True)
class _Shard:
    """A shard of a map stage that is being processed.

    in_work: set when all records are started.
    """

    stage: MapStage
    source: StageFolder
    folder: StageFolder
    index: int
    records: int
    clients: Clients
    window: asyncio.Semaphore
    progress: StageProgress
    codes: Counter[str] = field(default_factory=Counter)
    note_counts: Counter[str] = field(default_factory=Counter)
    open: Counter[str] = field(default_factory=Counter)
    in_work: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Process many records at once, write them in order, and mark the shard if none is open."""
        self.source.verify_input(self.index)
        started = time.monotonic()
        with (
            ShardWriter(self.folder.shard(self.index)) as accepted,
            ShardWriter(self.folder.rejected(self.index)) as rejected,
        ):
            async with self._tasks() as results:
                async for result in results:
                    self._write(result, accepted, rejected)
            if not self.open:
                rejected_digest = rejected.commit()
                digest = accepted.commit()
        log.info(
            "shard",
            stage=self.stage.name,
            shard=self.index,
            accepted=accepted.records,
            rejected=rejected.records,
            open=self.open.total(),
            seconds=round(time.monotonic() - started, 2),
        )
        if self.open:
            self.folder.set_open(self.index, self.open)
            return
        source_mark = self.source.mark(self.index) or {}
        self.folder.set_mark(
            self.index,
            {
                "records": accepted.records,
                "rejected": dict(sorted(self.codes.items())),
                "told": dict(sorted(self.note_counts.items())),
                "input": source_mark["digest"],
                "digest": digest,
                "rejected_digest": rejected_digest,
            },
        )

    def _write(
        self,
        result: KeptRecord | RejectedRecord | DeferredRecord,
        accepted: ShardWriter,
        rejected: ShardWriter,
    ) -> None:
        stats = self.progress.stats
        stats.records_in += 1
        if isinstance(result, DeferredRecord):
            self.open[result.reason_code] += 1
            stats.open[result.reason_code] += 1
            log.warning(
                "open",
                stage=self.stage.name,
                shard=self.index,
                source=result.record.get("source_id"),
                reason_code=result.reason_code,
                status=result.status,
            )
        elif isinstance(result, KeptRecord):
            accepted.write(result.record)
            stats.records_out += 1
            if result.note_code:
                self.note_counts[result.note_code] += 1
        else:
            rejected.write(result.as_record(self.stage.name))
            self.codes[result.reason_code] += 1
            stats.rejected[result.reason_code] += 1
        self.progress.advance(1, None)
        stats.flush(self.folder)

    async def _process(self, record: Record) -> KeptRecord | RejectedRecord | DeferredRecord:
        try:
            return await self.stage.process(record, self.clients)
        except TemporaryFailure as error:
            # Without the message, which may contain a server's text: this goes to the log.
            return DeferredRecord(record, error.code, error.status)

    @asynccontextmanager
    async def _tasks(
        self,
    ) -> AsyncIterator[AsyncIterator[KeptRecord | RejectedRecord | DeferredRecord]]:
        """Provide the results in order. An exception ends all tasks at once: with a full disk,
        waiting for an older record would waste more paid answers."""
        running: deque[asyncio.Task[KeptRecord | RejectedRecord | DeferredRecord]] = deque()

        async def results() -> AsyncIterator[KeptRecord | RejectedRecord | DeferredRecord]:
            for record in islice(read_records(self.source.shard(self.index)), self.records):
                while running and (running[0].done() or len(running) > AHEAD * self.clients.window):
                    yield await running.popleft()
                await self.window.acquire()  # shared by all shards
                running.append(group.create_task(self._process(record)))
                running[-1].add_done_callback(lambda _: self.window.release())
            self.in_work.set()
            while running:
                yield await running.popleft()

        async with asyncio.TaskGroup() as group:
            yield results()
