"""Get the batches of the updates of a training loop.

`BatchesInTurn` collects a batch in the loop's own thread, when its update begins, or a fixed number
of updates earlier. `BatchesAhead` collects the batches of the next updates in other threads, while
this update is learned from.

Update u (from 1) always learns from its own prompts, whichever episodes end first: no bias towards
short ones. Its batch is begun with weights of version u - 1 - `rl.max_staleness` or later (a
version is the number of updates behind the weights), so no token can be older than the bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.rl.distributed import DistributedContext
from trainer.runs.batches.batch import Batch, BatchCollector, drop_stale
from trainer.runs.batches.buffer import RolloutBuffer
from trainer.runs.learner import add_logprobs
from trainer.runs.open import OpenRun
from trainer.runs.run_log import PhaseTimer

log = logging.getLogger(__name__)
#: Seconds between two looks at a batch that is awaited, so that a signal is handled soon.
_TICK_S = 0.2
#: Seconds that `close` waits for the threads, which end at their next look.
_CLOSE_S = 5.0


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
