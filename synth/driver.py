"""Runs stages over shards: skip what is done, do the rest, write it in order, mark it.

A stage is a function of one record and of answers. Answers stand in a journal under a key of
their request's content, so that a run that was killed asks nobody twice: it works through the
shard's records again, finds their answers, and writes the same bytes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import structlog

from scorekit.errors import UserError
from synth.config import SynthConfig
from synth.record import Kept, Rejected
from synth.stats import StageStats
from synth.store import Journal, Record, ShardWriter, StageFolder, digest_of, read_records
from synth.tools import Tools
from synth.views import outputs

log = structlog.get_logger()

#: Shards in work at once: the next one begins while the last records of one are awaited.
SHARDS_AT_ONCE = 2


@dataclass(slots=True)
class Context:
    """One call of the command.

    inputs: folder in which a stage finds the one before it, where its own has none (a dry run).
    limit: records of the input that are taken at most, over all shards.
    advance: called with the number of records done, for a progress bar.
    """

    cfg: SynthConfig
    out_dir: Path
    inputs: Path | None = None
    resume: bool = False
    overwrite: bool = False
    limit: int | None = None
    shard_id: int = 0
    num_shards: int = 1
    advance: Callable[[int, int | None], None] = lambda done, total: None
    stats: StageStats = field(default_factory=StageStats)

    def folder(self, stage: str) -> StageFolder:
        """What a stage of this run writes."""
        return StageFolder(self.out_dir, stage)

    def input_of(self, stage: Stage) -> StageFolder:
        """What the stage before it wrote. Raises UserError where there is nothing."""
        assert stage.after is not None
        own = self.folder(stage.after)
        if own.manifest() is None and self.inputs is not None:
            own = StageFolder(self.inputs, stage.after)
        if own.shards() is None:
            raise UserError(f"{own.path}: nothing there; run --stage {stage.after} first")
        return own


class Stage(Protocol):
    """What all stages have. `settings`: the part of the config that its output depends on."""

    name: str
    after: str | None

    def settings(self, cfg: SynthConfig) -> dict[str, Any]: ...


class MapStage(Stage, Protocol):
    """A stage of one record at a time. uses: of "teacher", "metricx", "judge"."""

    def uses(self, cfg: SynthConfig) -> frozenset[str]: ...

    async def process(self, record: Record, tools: Tools) -> Kept | Rejected: ...


class WholeStage(Stage, Protocol):
    """A stage that has to see all records. It writes its shards, marks and manifest."""

    def run(self, ctx: Context, manifest: dict[str, Any]) -> None: ...


def begin(stage: Stage, later: list[str], ctx: Context) -> dict[str, Any]:
    """Check what is there against what is asked; the manifest to work under.

    later: names of the stages after this one, which `overwrite` clears too. Raises UserError.
    """
    folder = ctx.folder(stage.name)
    before = ctx.input_of(stage).manifest() if stage.after else None
    wanted: dict[str, Any] = {
        "stage": stage.name,
        "settings": stage.settings(ctx.cfg),
        "input": before["digest"] if before else None,
        "limit": ctx.limit,
    }
    wanted["digest"] = digest_of(wanted)
    if ctx.overwrite:
        if ctx.num_shards > 1:
            raise UserError(
                "--overwrite clears what all machines have made: delete "
                f"{folder.path} and the later stages yourself, then start the machines without it"
            )
        clear(ctx, stage.name, later)
    found = folder.manifest()
    if found is None:
        return wanted
    if not ctx.resume and _has_output(folder, ctx):
        raise UserError(f"{folder.path}: has output already; give --resume or --overwrite")
    if found["digest"] != wanted["digest"]:
        raise UserError(
            f"{folder.path}: was begun with other settings: {_difference(found, wanted)}; "
            "give --overwrite, or the old ones"
        )
    return found


def clear(ctx: Context, stage: str, later: list[str]) -> None:
    """Delete what a stage and those after it have written, the last stage first: whatever stands
    when this is killed was made of what stands. A stage's own view or export stays until the new
    one takes its place."""
    for name in reversed(later):
        for path in outputs(ctx.out_dir, name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        ctx.folder(name).clear()
    ctx.folder(stage).clear()


def _has_output(folder: StageFolder, ctx: Context) -> bool:
    shards = folder.shards()
    if not shards:  # begun, and not known yet: other machines may be at it
        return ctx.num_shards == 1
    return any(folder.mark(i) or folder.journal(i).exists() for i in own_shards(shards, ctx))


def own_shards(shards: int, ctx: Context) -> range:
    """The shards that this process works on."""
    return range(ctx.shard_id, shards, ctx.num_shards)


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    old, new = dict(_flat(found)), dict(_flat(wanted))
    changed = [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and key not in ("digest", "shards")
    ]
    return "; ".join(changed[:5]).replace("settings.", "") or "its input has changed"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


async def run_map_stage(stage: MapStage, manifest: dict[str, Any], ctx: Context) -> None:
    """All of this process's shards of a stage. Raises UserError where an input is not there."""
    source = ctx.input_of(stage)
    folder = ctx.folder(stage.name)
    shards = source.shards() or 0
    if "shards" not in manifest:
        folder.set_manifest({**manifest, "shards": shards})
    plan = list(_plan(source, folder, shards, ctx))
    total = sum(records for _, records, done in plan)
    ctx.advance(sum(records for _, records, done in plan if done), total)
    for index, _, done in plan:
        if done:  # killed before its journal was deleted
            folder.journal(index).unlink(missing_ok=True)
    if all(done for *_, done in plan):
        return  # nobody is needed, and perhaps nobody is there any more
    todo = iter([(index, records) for index, records, done in plan if not done])
    async with Tools.open(ctx.cfg, stage.uses(ctx.cfg), folder, ctx.stats) as tools:
        window = asyncio.Semaphore(tools.window)

        async def work() -> None:
            for index, records in todo:
                await _Shard(stage, ctx, source, folder, index, records, tools, window).run()

        async with asyncio.TaskGroup() as group:
            for _ in range(SHARDS_AT_ONCE):
                group.create_task(work())


def _plan(
    source: StageFolder, folder: StageFolder, shards: int, ctx: Context
) -> Iterator[tuple[int, int, bool]]:
    """(shard, records to take of it, whether it is done) of this process's shards."""
    room = ctx.limit
    own_indexes = own_shards(shards, ctx)
    for index in range(shards):
        if room is None and index not in own_indexes:
            continue  # it may be another machine's, not yet done
        mark = source.mark(index)
        if mark is None:
            raise UserError(f"{source.path}: shard {index} is not done; resume that stage first")
        records = mark["records"] if room is None else min(mark["records"], room)
        room = None if room is None else room - records
        if index not in own_indexes:
            continue
        own = folder.mark(index)
        if own is not None and own["input"] != mark["digest"]:
            raise UserError(
                f"{folder.path}: shard {index} was made from another {source.name}; "
                "give --overwrite"
            )
        yield index, records, own is not None


class _Shard:
    """One shard of a map stage in work."""

    def __init__(
        self, stage: MapStage, ctx: Context, source: StageFolder, folder: StageFolder,
        index: int, records: int, tools: Tools, window: asyncio.Semaphore,
    ) -> None:  # fmt: skip
        self.stage, self.ctx, self.source, self.folder = stage, ctx, source, folder
        self.index, self.records, self.tools, self.window = index, records, tools, window
        self.codes: Counter[str] = Counter()

    async def run(self) -> None:
        """Work through the records in order, many at once; write them in order; mark the shard."""
        run = self.ctx.cfg.run
        path = self.folder.journal(self.index)
        journal = Journal(path, fsync_records=run.fsync_records, fsync_s=run.fsync_s)
        started = time.monotonic()
        tools = self.tools.with_journal(journal)
        try:
            with (
                ShardWriter(self.folder.shard(self.index)) as kept,
                ShardWriter(self.folder.rejected(self.index)) as rejected,
            ):
                async with self._tasks(tools) as results:
                    async for result in results:
                        self._write(result, kept, rejected)
                rejected_digest = rejected.commit()
                digest = kept.commit()
        finally:
            journal.close()
        source_mark = self.source.mark(self.index) or {}
        self.folder.set_mark(
            self.index,
            {
                "records": kept.records,
                "rejected": dict(sorted(self.codes.items())),
                "input": source_mark["digest"],
                "digest": digest,
                "rejected_digest": rejected_digest,
            },
        )
        journal.remove()
        seconds = round(time.monotonic() - started, 2)
        log.info("shard", stage=self.stage.name, shard=self.index, kept=kept.records,
                 rejected=rejected.records, seconds=seconds)  # fmt: skip

    def _write(self, result: Kept | Rejected, kept: ShardWriter, rejected: ShardWriter) -> None:
        stats = self.ctx.stats
        stats.records_in += 1
        if isinstance(result, Kept):
            kept.write(result.record)
            stats.records_out += 1
        else:
            rejected.write(result.as_record(self.stage.name))
            self.codes[result.reason_code] += 1
            stats.rejected[result.reason_code] += 1
        self.ctx.advance(1, None)
        stats.flush(self.folder)

    @asynccontextmanager
    async def _tasks(self, tools: Tools) -> AsyncIterator[AsyncIterator[Kept | Rejected]]:
        running: deque[asyncio.Task[Kept | Rejected]] = deque()

        async def results() -> AsyncIterator[Kept | Rejected]:
            for record in islice(read_records(self.source.shard(self.index)), self.records):
                while running and (running[0].done() or self.window.locked()):
                    yield await running.popleft()
                await self.window.acquire()
                running.append(asyncio.create_task(self.stage.process(record, tools)))
                running[-1].add_done_callback(lambda _: self.window.release())
            while running:
                yield await running.popleft()

        try:
            yield results()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
