"""The batches of updates: what collects them, when, and what is kept of them on disk.

`BatchesInTurn` collects a batch in the loop's own thread, when its update begins, or a fixed number
of updates earlier. `BatchesAhead` collects the batches of the next updates in other threads, while
this update is learned from.

Update u (from 1) always learns from its own prompts, whichever episodes end first: no bias towards
short ones. Its batch is begun with weights of version u - 1 - `rl.max_staleness` or later (a
version is the number of updates behind the weights), so no token can be older than the bound.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from scorekit.files import with_path_in_error
from scorekit.seeds import stream_seed
from trainer.rl.distributed import DistributedContext
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler
from trainer.runs.learner import add_logprobs
from trainer.runs.open import OpenRun
from trainer.runs.run_log import PhaseTimer, append_jsonl, read_jsonl

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Rollout)
W = TypeVar("W")
#: Seconds between two looks at a batch that is awaited, so that a signal is handled soon.
_TICK_S = 0.2
#: Seconds that `close` waits for the threads, which end at their next look.
_CLOSE_S = 5.0
FOLDER = "buffer"
_NAME = re.compile(r"update-(\d{6,})-(\d{1,6})\.jsonl")


@dataclass(slots=True)
class Batch(Generic[R, W]):
    """The rollouts of an update with their rewards, in the same order.

    scored_indices: indices of those that have a reward.
    attempts: how often rewards were requested from the services.
    dropped_stale: number of rollouts that were left out because they were older than
    `rl.max_staleness` allows.
    """

    rollouts: list[R]
    rewards: list[W]
    scored_indices: list[int]
    attempts: int = 1
    dropped_stale: int = 0

    def select_scored(self) -> tuple[list[R], list[W]]:
        """Return the rollouts that are trained on, and their rewards."""
        return [self.rollouts[i] for i in self.scored_indices], [
            self.rewards[i] for i in self.scored_indices
        ]


class BatchCollector(Protocol):
    """The part of a task that samples its batches.

    stop_reason: the reason why the last batch has no rewards, or an evaluation failed, in one line;
    None: it has, or the run is to end.
    """

    stop_reason: str | None

    def collect(self, sampler: Sampler, update: int, clock: PhaseTimer) -> Batch[Any, Any] | None:
        """Return the full batch of an update, the same on every process.

        None: it has no rewards, and the update has not started.
        """


def batch_indices(examples: int, batch_size: int, update: int, seed: int) -> list[int]:
    """Return the prompts of update `update` (from 1): shuffled passes over the data.

    They depend only on the arguments, so that a run can be resumed at any update.
    """
    import torch

    indices: list[int] = []
    for position in range((update - 1) * batch_size, update * batch_size):
        epoch, offset = divmod(position, examples)
        if offset == 0 or not indices:
            generator = torch.Generator().manual_seed(stream_seed("order", seed, epoch))
            order = torch.randperm(examples, generator=generator).tolist()
        indices.append(order[offset])
    return indices


def oldest_version(rollout: Rollout) -> int | None:
    """Return the oldest weights that sampled a token; None if the sampler does not know."""
    if rollout.weight_versions is None:
        return None
    return min(
        (
            version
            for version, is_action in zip(rollout.weight_versions, rollout.actions, strict=True)
            if is_action
        ),
        default=None,
    )


def is_stale(rollout: Rollout, update: int, max_staleness: int) -> bool:
    """Return whether a token is older than update `update` may learn from.

    The age of a token is the number of updates between the weights that sampled it and those that
    learn from it, which have version `update` - 1.
    """
    version = oldest_version(rollout)
    return version is not None and update - 1 - version > max_staleness


def drop_stale(batch: Batch[Any, Any], update: int, max_staleness: int) -> None:
    """Leave out, and count, the groups with a rollout that is older than the bound."""
    stale_groups = {
        rollout.group for rollout in batch.rollouts if is_stale(rollout, update, max_staleness)
    }
    dropped: Sequence[int] = [
        index for index in batch.scored_indices if batch.rollouts[index].group in stale_groups
    ]
    batch.dropped_stale += len(dropped)
    batch.scored_indices = [index for index in batch.scored_indices if index not in set(dropped)]


class RolloutBuffer:
    """Keeps on disk what was generated for the next updates, so that a killed run does not lose it.

        RUN/buffer/update-000007-0.jsonl    one object for each finished episode or sample group of
                                            the batch of update 7, of process 0

    Only a run with `rl.max_staleness` above 0 has it. The files of an update are removed when a
    checkpoint holds that update: a run that is resumed from an earlier one needs them again.
    This is the buffer of one process. Threads may share it.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Prepare to read and write.

        run_dir: the folder of the run.
        rank: the index of this process, which writes its own files and reads those of all.
        """
        self.folder, self._rank = run_dir / FOLDER, rank
        self._opened: set[Path] = set()
        self._lock = threading.Lock()

    def updates(self) -> list[int]:
        """Return the updates that have files, ascending."""
        return sorted({update for update, _ in self._files()})

    def read(self, update: int) -> list[dict[str, Any]]:
        """Return the rows of an update, of all processes, in the order in which each wrote them.

        A last line that is incomplete is left out. Raises UserError for a damaged file.
        """
        paths = [path for number, path in self._files() if number == update]
        return [row for path in paths for row in read_jsonl(path)]

    def append(self, update: int, row: dict[str, Any]) -> None:
        """Add a row, which survives if this process dies."""
        path = self.folder / f"update-{update:06d}-{self._rank}.jsonl"
        with self._lock:
            if path not in self._opened:
                self.folder.mkdir(parents=True, exist_ok=True)
                _cut_incomplete_line(path)
                self._opened.add(path)
            append_jsonl(path, row)

    def cut(self, done: int) -> None:
        """Remove the files of the updates up to `done`, which a checkpoint holds.

        One process of the run calls it.
        """
        for update, path in self._files():
            if update <= done:
                path.unlink()

    def _files(self) -> list[tuple[int, Path]]:
        """Return (update, file) of all files of the buffer, by their names."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), path) for match, path in matches if match]


def _cut_incomplete_line(path: Path) -> None:
    """Remove what a killed process left of its last line, so that the next one starts a line."""
    if not path.exists():
        return
    with with_path_in_error(path), path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        os.fsync(file.fileno())


class OpensCollectors(Protocol):
    """The part of a task that opens collectors."""

    def open_collector(
        self,
        world: DistributedContext,
        buffer: RolloutBuffer | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> BatchCollector:
        """Return a collector that one thread uses.

        world: for its exchanges with the other processes.
        buffer: where it keeps what was generated; it then leaves the log-probabilities to the loop.
        None: it keeps nothing, and sets the log-probabilities.
        should_stop: whether the run is to end; None: after a signal.
        """


class BatchSource:
    """Gives the loop its batches.

    stop_reason: why the last batch is missing, in one line; None: it is not, or the run is to end.
    """

    stop_reason: str | None = None

    def __init__(self, run: OpenRun[Any], buffer: RolloutBuffer) -> None:
        """Keep the run and its buffer."""
        self._run, self._buffer = run, buffer

    def take(self, update: int, clock: PhaseTimer) -> Batch[Any, Any] | None:
        """Return the batch of an update, with log-probabilities; None: the update cannot start.

        Called for one update after another, when the sampler has the weights of the one before.
        clock: gets the seconds of the phases.
        """
        raise NotImplementedError

    def saved(self, update: int) -> None:
        """Remove from the buffer what a checkpoint of this update holds."""
        if self._run.world.is_main:
            self._buffer.cut(update)

    def close(self) -> None:
        """End what runs ahead."""


def open_batches(run: OpenRun[Any], task: OpensCollectors, first: BatchCollector) -> BatchSource:
    """Return the source of the batches of a run. Every process has to call it.

    first: the collector of a run that generates and learns in turn.
    """
    rl, world, done = run.cfg.rl, run.world, run.done or 0
    buffer = RolloutBuffer(Path(run.cfg.misc.run_dir), world.rank)
    if world.is_main:
        buffer.cut(done)
    if rl.max_staleness == 0:
        if world.is_main:
            _report_unused(buffer)
        return BatchesInTurn(first, run, buffer, lead=0)
    if world.is_main:
        _report_buffer(buffer, done)
    if run.cfg.generation.engine == "generate":
        if world.is_main:
            log.warning(
                "rl.max_staleness: %d, but this process both generates and learns: each batch is "
                "generated that many updates early, and no time is won. A vLLM sampler generates "
                "while this process learns (generation.engine)",
                rl.max_staleness,
            )
        collector = task.open_collector(world, buffer)
        return BatchesInTurn(collector, run, buffer, lead=rl.max_staleness)
    return BatchesAhead(task, run, buffer)


def _report_buffer(buffer: RolloutBuffer, done: int) -> None:
    """Log what an earlier start has generated already."""
    counts = {update: len(buffer.read(update)) for update in buffer.updates()}
    if counts:
        rows = ", ".join(f"{count} rows of update {update}" for update, count in counts.items())
        log.warning("after update %d, the run goes on with its buffer: %s", done, rows)


def _report_unused(buffer: RolloutBuffer) -> None:
    """Log what a start with staleness has left, which a run without it does not learn from."""
    if updates := buffer.updates():
        log.warning(
            "rl.max_staleness is 0 now: what was generated early for the updates %s is generated "
            "again, and removed when they are saved",
            ", ".join(map(str, updates)),
        )


class BatchesInTurn(BatchSource):
    """Collects the batch of update u + `lead` just before update u, in the caller's thread."""

    def __init__(
        self, collector: BatchCollector, run: OpenRun[Any], buffer: RolloutBuffer, *, lead: int
    ) -> None:
        """Prepare to collect.

        lead: 0: the collector sets the log-probabilities; else they are set here, at the update.
        """
        super().__init__(run, buffer)
        self._collector, self._lead = collector, lead
        self._collected: dict[int, Batch[Any, Any]] = {}
        self._next = (run.done or 0) + 1

    def take(self, update: int, clock: PhaseTimer) -> Batch[Any, Any] | None:
        """Return the batch of an update, as `BatchSource.take` says."""
        run = self._run
        while self._next <= min(update + self._lead, run.cfg.rl.num_updates):
            batch = self._collector.collect(run.sampler, self._next, clock)
            self.stop_reason = self._collector.stop_reason
            if batch is None:
                return None
            self._collected[self._next] = batch
            self._next += 1
        batch = self._collected.pop(update)
        if self._lead:
            _prepare(batch, update, run, clock)
        return batch


#: The result of a thread: a batch or None, the reason why it is missing, and its seconds.
_Collected = tuple[Batch[Any, Any] | None, str | None, dict[str, float]]


@dataclass(slots=True)
class _Slot:
    """One thread with its collector, which collects one batch at a time.

    world: the fork that the collector exchanges with.
    """

    world: DistributedContext
    collector: BatchCollector
    thread: ThreadPoolExecutor


class BatchesAhead(BatchSource):
    """Collects up to `rl.max_staleness` batches beyond the one that is awaited, in threads.

    They run at the same time: while one waits for its last episodes, samplers work for the next.
    """

    def __init__(self, task: OpensCollectors, run: OpenRun[Any], buffer: RolloutBuffer) -> None:
        super().__init__(run, buffer)
        self._is_closing = False
        self._submitted = run.done or 0
        self._batches: dict[int, Future[_Collected]] = {}
        remaining = run.cfg.rl.num_updates - self._submitted
        num_slots = max(1, min(run.cfg.rl.max_staleness + 1, remaining))
        self._slots = [self._open_slot(task, number) for number in range(num_slots)]

    def _open_slot(self, task: OpensCollectors, number: int) -> _Slot:
        world = self._run.world.fork(f"batches {number}")
        collector = task.open_collector(world, self._buffer, self._should_stop)
        return _Slot(world, collector, ThreadPoolExecutor(1, thread_name_prefix="batches"))

    def take(self, update: int, clock: PhaseTimer) -> Batch[Any, Any] | None:
        """Return the batch of an update, as `BatchSource.take` says.

        The sampler has the weights of version update - 1 now, so batches up to update +
        max_staleness may begin.
        """
        rl = self._run.cfg.rl
        while self._submitted < min(update + rl.max_staleness, rl.num_updates):
            self._submitted += 1
            slot = self._slots[self._submitted % len(self._slots)]
            self._batches[self._submitted] = slot.thread.submit(
                self._collect, slot.collector, self._submitted
            )
        future = self._batches.pop(update)
        while not wait([future], _TICK_S).done:
            pass  # a signal is handled between two looks
        batch, self.stop_reason, seconds = future.result()
        clock.lap("waited_s")
        clock.seconds |= seconds
        if batch is not None:
            _prepare(batch, update, self._run, clock)
        return batch

    def close(self) -> None:
        """Tell the threads to end. One that waits for the sampler ends when that is closed."""
        self._is_closing = True
        for future in self._batches.values():
            future.cancel()
        wait(self._batches.values(), _CLOSE_S)
        for slot in self._slots:
            slot.world.close()
            slot.thread.shutdown(wait=False, cancel_futures=True)

    def _should_stop(self) -> bool:
        return self._is_closing or bool(self._run.shutdown.signal_number)

    def _collect(self, collector: BatchCollector, update: int) -> _Collected:
        clock = PhaseTimer()
        batch = collector.collect(self._run.sampler, update, clock)
        return batch, collector.stop_reason, clock.seconds


def _prepare(batch: Batch[Any, Any], update: int, run: OpenRun[Any], clock: PhaseTimer) -> None:
    """Leave out what is older than the bound, and set the log-probabilities at these weights."""
    drop_stale(batch, update, run.cfg.rl.max_staleness)
    run.world.set_phase(f"update {update}, log probabilities")
    _share_logprobs(batch.rollouts, run)
    clock.lap("logprob_s")


def _share_logprobs(rollouts: Sequence[Any], run: OpenRun[Any]) -> None:
    """Set the log-probabilities of rollouts that all processes have; each computes a part."""
    world = run.world
    own_indices = list(world.own_block(range(len(rollouts))))
    add_logprobs([rollouts[index] for index in own_indices], run.learner, run.cfg, world)
    if world.size == 1:
        return
    names = ("ref_logprobs", "sampler_logprobs", "old_logprobs")
    rows = {index: [getattr(rollouts[index], name) for name in names] for index in own_indices}
    for part in world.gather([rows]):
        for index, values in part.items():
            for name, value in zip(names, values, strict=True):
                setattr(rollouts[index], name, value)
