"""The queue between requests and the model: one place to wait, one lock.

The event loop admits a request as a whole, or refuses it at once; equal samples in flight are
scored once. One thread tokenizes. Another owns the model and starts a batch as soon as it is free:
parts of similar length from all that wait, of any request (`pools.py`). If texts may be scored in
windows, a third thread splits those.

One lock, `Batcher.changed`, guards pools, turns, and the parts of samples. The event loop owns
the samples in flight and the requests. It takes the lock only to raise a priority, to drop samples
that no request waits for, to say how long some wait, and once the model has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import structlog
from pydantic_core import PydanticSerializationError

from scorekit.errors import RequestError, SampleError
from scorekit.schemas import Priority
from scorekit.server.backend import Backend, Encoded, Outcome, spare_workers_of, workers_of
from scorekit.server.batches import ItemEncoder, ModelRunner
from scorekit.server.endpoint import Answer, ModelDescription, ParsedRequest
from scorekit.server.metrics import Metrics
from scorekit.server.pools import (
    KINDS,
    InFlightSample,
    PendingItem,
    PendingRequest,
    PoolTurns,
    QueuedPart,
)
from scorekit.server.settings import ModelSettings, ServiceSettings
from scorekit.server.tokenizers import LengthLog
from scorekit.server.windows import (
    encode_in_windows,
    encode_uncut,
    has_windows,
    outcome_of_windows,
)

log = structlog.get_logger()

#: A request is large if it fills more than so many batches, for each of the model's workers.
LARGE = 4
#: Bytes of text that count as one token in the queue's limit.
BYTES_A_TOKEN = 4
#: Samples of a request, and bytes of their texts, that are tokenized together: then the requests
#: behind it have their turns, some tenths of a second later.
PIECE, PIECE_BYTES = 256, 256 * 1024
#: Seconds in one call of the tokenizer after which it counts as hanging: many times what the
#: largest request takes. And in splitting one sample into windows.
TOKENISE_STALL_S, CUT_STALL_S = 30.0, 120.0
#: Seconds between two probes of a failing model.
PROBE_S = 1.0


@dataclass(slots=True, eq=False)
class TokenizeTask:
    """Samples of one request that wait for the tokenizer; `begin` is the first that does."""

    job: PendingRequest
    samples: Sequence[InFlightSample]
    options: Any
    priority: Priority
    begin: int = 0


class TokenizerLine:
    """Requests that wait for a thread that tokenizes, in one line.

    After a piece of a request, its remaining samples go to the end. Of bulk requests one at a time
    is in the line, so that others wait for one piece of bulk at most.
    lock: of the batcher.
    """

    def __init__(self, lock: threading.Condition, max_samples: int) -> None:
        self._line: SimpleQueue[TokenizeTask | None] = SimpleQueue()
        self._lock = lock
        self._max_samples = max_samples
        self._bulk: deque[TokenizeTask] = deque()  # guarded by the lock
        self._has_bulk = False  # guarded by the lock
        self._stopped = False

    def put(self, task: TokenizeTask) -> None:
        """Add a request to the end."""
        if task.priority == "bulk":
            with self._lock:
                if self._has_bulk:
                    self._bulk.append(task)
                    return
                self._has_bulk = True
        self._line.put(task)

    def take(self) -> tuple[TokenizeTask, Sequence[InFlightSample]] | None:
        """Wait for the next piece of a request, and return it; None once stopped."""
        task = self._line.get()
        if task is None or self._stopped:
            return None
        begin, size = task.begin, task.samples[task.begin].size
        end = begin + 1
        while end < min(len(task.samples), begin + self._max_samples):
            size += task.samples[end].size
            if size > PIECE_BYTES:
                break
            end += 1
        task.begin = end
        return task, task.samples[begin:end]

    def put_back(self, task: TokenizeTask) -> None:
        """Add the remaining samples of a request to the end, or else the next bulk request."""
        if task.begin < len(task.samples):
            self._line.put(task)
        elif task.priority == "bulk":
            with self._lock:
                self._has_bulk = bool(self._bulk)
                if self._bulk:
                    self._line.put(self._bulk.popleft())

    def stop(self) -> None:
        """End the thread that waits; a second call does nothing."""
        self._stopped = True
        self._line.put(None)


class BusyWorker:
    """A worker that has taken a batch (`backend.Worker`).

    count: changes the busy workers.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        # The backend's thread changes it in `forward`, the model's thread after that.
        self._is_busy = True

    def release(self) -> None:
        """Let another worker take a batch; a second call does nothing."""
        if self._is_busy:
            self._is_busy = False
            self._count(-1)

    def resume(self) -> None:
        """Count the worker as busy again."""
        if not self._is_busy:
            self._is_busy = True
            self._count(1)


class Batcher:
    """Samples in flight, the threads of the tokenizer and the model, and where samples wait.

    All public methods but `warm_up` belong to the event loop.

    on_scored: called on the event loop with the answers to store.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServiceSettings,
        metrics: Metrics,
        on_scored: Callable[[Mapping[bytes, bytes]], None],
    ) -> None:
        self._backend = backend
        self._endpoint = backend.endpoint
        self._has_windows = has_windows(backend)
        self._metrics = metrics
        self._on_scored = on_scored
        self._max_items, self._max_tokens = settings.max_queue_items, settings.max_queue_tokens
        self._own_batches = isinstance(settings, ModelSettings) and settings.own_batches
        self._most_wait_s = settings.unready_after or settings.timeout_s / 2
        self._workers, spare_workers = workers_of(backend), spare_workers_of(backend)
        # With spare workers, most batches that are taken and not finished, those of released
        # workers aside; without, there are no more threads than that.
        self._max_busy = self._workers if spare_workers else math.inf
        self.model = ModelRunner(backend, settings, metrics)
        self._length_log = LengthLog(
            partial(_write_lengths, backend.service),
            lambda name: metrics.truncated.labels(name).inc(),
        )
        self.changed = threading.Condition()
        self.turns = PoolTurns(settings.bulk_patience_s)  # guarded by the lock
        self._busy = 0  # guarded by the lock
        self._stopped = False  # guarded by the lock
        self.flights: dict[bytes, InFlightSample] = {}  # of the event loop
        self.tokens_in_use = 0  # of the event loop: tokens of the queue's limit
        self._waits_long = False  # of the event loop
        # Whether a thread has ended by an error: nothing will be scored any more.
        self.is_dead = False
        self._line = TokenizerLine(self.changed, PIECE)
        self._to_cut = TokenizerLine(self.changed, 1)  # texts to split into windows
        min_stall_s = settings.stall_after or 0.0
        tokenizer = ItemEncoder(self._encode, max(TOKENISE_STALL_S, min_stall_s))
        self._encoders = [tokenizer]
        targets: list[tuple[str, Callable[[], None]]] = [
            ("tokenise", partial(self._run_encoder, tokenizer, self._line))
        ]
        if self._has_windows:
            encode = partial(encode_in_windows, backend)
            cutter = ItemEncoder(encode, max(CUT_STALL_S, min_stall_s))
            self._encoders.append(cutter)
            targets.append(("cut", partial(self._run_encoder, cutter, self._to_cut)))
        targets += [("model", self._run_model)] * (self._workers + spare_workers)
        self._threads = [
            threading.Thread(target=self._guard, args=(target,), name=name, daemon=True)
            for name, target in targets
        ]
        for kind in KINDS:
            metrics.longest_wait.labels(kind).set_function(partial(self.longest_wait, kind))

    def warm_up(self, description: ModelDescription) -> None:
        """Run the largest possible batch, before `start`.

        Raises UserError if it does not fit the memory, or if a plain text gets no outcome."""
        self.model.warm_up(description)
        self._max_length = description.max_input_length
        # Tokens, or samples, of a request that is not large.
        self._most_of_small = LARGE * self._workers * self.model.max_tokens

    def start(self) -> None:
        """Accept work; call it on the running event loop, after `warm_up`."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Finish the current batches, then end the threads.

        wait_s: seconds to wait for them.
        """
        self._line.stop()
        self._to_cut.stop()
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self._length_log.flush()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    # -- health ---------------------------------------------------------------------------------

    def unhealthy_reason(self) -> str | None:
        """Return why the model does not answer, or not soon; None while it does."""
        if (reason := self._find_standstill()) is not None:
            return reason
        return "the model fails" if self.model.failing else self._long_wait()

    def longest_wait(self, kind: str) -> float:
        """Return the longest wait in seconds of a sample of one of `KINDS` that is not dispatched;
        0 without one."""
        since = [
            sample.enqueued_at
            for sample in self.flights.values()
            if not sample.parts and sample.kind == kind
        ]
        with self.changed:
            oldest = self.turns.oldest(kind)
        now = time.monotonic()
        return max(0.0, now - min([*since, now if oldest is None else oldest]))

    def _find_standstill(self) -> str | None:
        """Return why a sample put in flight now would not be answered; None if it would."""
        if self.is_dead or not all(thread.is_alive() for thread in self._threads):
            return "the model thread ended"
        if self.model.timing.is_stalled():
            return "the model hangs in a batch"
        if any(encoder.timing.is_stalled() for encoder in self._encoders):
            return "the tokeniser hangs"
        return None

    def _long_wait(self) -> str | None:
        """Return why a small request would wait for long, or None.

        Once it does, the reason stays until the wait is half as long, so that a load balancer does
        not see the service go up and down."""
        wait = self.longest_wait("small")
        self._waits_long = wait > self._most_wait_s / (2 if self._waits_long else 1)
        return (
            f"a small request has waited {wait:.0f} s for the model" if self._waits_long else None
        )

    # -- the event loop's part ------------------------------------------------------------------

    def submit(
        self, job: PendingRequest, items: Sequence[PendingItem], request: ParsedRequest
    ) -> None:
        """Put items of a request in flight; equal keys share one in-flight sample.

        items: the items of `request` that are not cached.

        Raises RequestError, with nothing put in flight: `unavailable` if nothing would be answered,
        `too_large` if the new ones could never fit, `overloaded` if they do not fit now.
        """
        reason = self._find_standstill()
        if reason is not None:
            raise RequestError("unavailable", reason, retry_after=10.0)
        flights, priority, now = self.flights, request.priority, time.monotonic()
        sizes = [item.size // BYTES_A_TOKEN + 1 for item in items]
        if getattr(request.options, "overlong", None) != "windows":  # those are read completely
            sizes = [min(size, self._max_length) for size in sizes]
        total = len(sizes) if self.model.in_items else sum(sizes)
        is_large = total > self._most_of_small
        pool_owner = job if is_large or self._own_batches else None
        new: dict[bytes, InFlightSample] = {}
        total_cost = 0
        for item, cost in zip(items, sizes, strict=True):
            if item.key not in flights and item.key not in new:
                total_cost += cost
                new[item.key] = InFlightSample(
                    item.key, item.sample, priority, cost, now, item.size, pool_owner, is_large
                )
        self._admit(len(new), total_cost)
        flights.update(new)
        self.tokens_in_use += total_cost
        promoted: dict[InFlightSample, None] = {}
        for item in items:
            sample = flights[item.key]
            if (indexes := sample.waiters.get(job)) is None:
                job.flights.append(sample)
                sample.waiters[job] = [item.index]
            else:
                indexes.append(item.index)
            sample.should_cache |= request.cache
            from_bulk = sample.priority == "bulk" and priority == "interactive"
            from_large = (
                sample.priority == priority and sample.pool_owner is not None and pool_owner is None
            )
            if from_bulk or from_large:
                promoted[sample] = None
        job.pending_count += len(items)
        self._metrics.joined.inc(len(items) - len(new))
        self._gauge()
        if promoted:  # batched with this request's samples
            self._promote(job, list(promoted), request, pool_owner, is_large)
        if new:
            self._line.put(TokenizeTask(job, list(new.values()), request.options, priority))

    def release(self, job: PendingRequest) -> None:
        """Note that a request no longer waits; samples without a waiting request are dropped."""
        dropped = []
        for sample in job.flights:
            sample.waiters.pop(job, None)
            if not sample.waiters and self.flights.get(sample.key) is sample:
                dropped.append(sample)
        job.flights = []
        if dropped:
            with self.changed:
                # What the model has is scored for the cache; windows that wait are dropped.
                dropped = [s for s in dropped if len(s.parts) > 1 or not s.is_dispatched]
                self.turns.remove(part for sample in dropped for part in sample.parts)
        for sample in dropped:
            sample.item = None
            self._forget(sample)
        self._gauge()

    def _admit(self, items: int, cost: int) -> None:
        if items > self._max_items:
            message = f"{items} samples, the queue holds {self._max_items}"
            raise RequestError("too_large", message)
        if cost > self._max_tokens:
            message = f"about {cost} tokens in a request, the queue holds {self._max_tokens}"
            raise RequestError("too_large", message)
        if (
            len(self.flights) + items > self._max_items
            or self.tokens_in_use + cost > self._max_tokens
        ):
            # The seconds until the queue should be half empty at the measured rate.
            seconds = len(self.flights) / 2 / (self.model.timing.samples_per_s or 1.0)
            retry_after = min(60.0, max(1.0, seconds))
            raise RequestError("overloaded", "the queue is full", retry_after=retry_after)

    def _promote(
        self,
        job: PendingRequest,
        samples: Sequence[InFlightSample],
        request: ParsedRequest,
        pool_owner: PendingRequest | None,
        is_large: bool,
    ) -> None:
        """Give samples the priority and the pool of one more request that waits for them."""
        now = time.monotonic()
        with self.changed:
            for sample in samples:
                sample.priority, sample.pool_owner = request.priority, pool_owner
                sample.is_large = is_large
                sample.enqueued_at = now
            self.turns.put(self.turns.remove(part for sample in samples for part in sample.parts))
            unread = [sample for sample in samples if not sample.parts]
        if unread:  # they pass those before them in the line; there they are skipped
            self._line.put(TokenizeTask(job, unread, request.options, request.priority))

    def _deliver(
        self,
        parts: Sequence[QueuedPart],
        outcomes: Sequence[Outcome],
        started: float,
        seconds: float,
    ) -> None:
        """Give each outcome to all requests that wait for it; outcomes of windows are merged first.

        started, seconds: of their batch."""
        completed: list[tuple[InFlightSample, Outcome]] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            sample = part.sample
            for job in sample.waiters:
                job.note_batch(parts, started, seconds)
            part.outcome = outcome
            if self.flights.get(sample.key) is not sample:  # a window of one dropped or failed
                continue
            if sample.encoded is part.encoded:
                completed.append((sample, outcome))
                continue
            sample.pending_parts -= 1
            if sample.encoded is not None and (
                not sample.pending_parts or isinstance(outcome, SampleError)
            ):
                of_windows = [window.outcome for window in sample.parts]
                completed.append((sample, outcome_of_windows(sample.encoded, of_windows)))
        self._answer(completed)

    def _answer(self, completed: Iterable[tuple[InFlightSample, Outcome]]) -> None:
        good: dict[bytes, bytes] = {}
        windows: list[QueuedPart] = []
        for sample, outcome in completed:
            if self.flights.get(sample.key) is not sample:  # it was dropped, or a window has failed
                continue
            answer = _answer_of(outcome, self._endpoint.serialize_outcome)
            if sample.should_cache and isinstance(answer, bytes):
                good[sample.key] = answer
            if len(sample.parts) > 1:
                windows += sample.parts
            self._forget(sample)
            waiters, sample.waiters = sample.waiters, {}
            for job, indexes in waiters.items():
                for index in indexes:
                    job.set_answer(index, answer)
        if windows:  # of a sample that has failed, those that wait need not be scored
            with self.changed:
                self.turns.remove(windows)
        if good:
            self._on_scored(good)
        self._gauge()

    def _fail_all(self) -> None:
        """Fail all samples, because the model's thread has ended.

        The current batch may be the cause, so its requests are not sent to another replica: their
        samples fail. Other requests are refused, and may be sent to another replica."""
        flights, message = list(self.flights.values()), "the model thread ended"
        with self.changed:
            dispatched = [sample for sample in flights if sample.is_dispatched]
        suspects = {job for sample in dispatched for job in sample.waiters}
        for sample in flights:
            for job in sample.waiters:
                if job not in suspects:
                    job.finish(RequestError("unavailable", message, retry_after=10.0))
        self._answer((sample, SampleError("model_failure", message)) for sample in flights)

    def _forget(self, sample: InFlightSample) -> None:
        del self.flights[sample.key]
        self.tokens_in_use -= sample.token_cost
        sample.parts = ()  # each refers to its sample: a circle would wait for the collector

    def _gauge(self) -> None:
        self._metrics.queue_items.set(len(self.flights))
        self._metrics.queue_tokens.set(self.tokens_in_use)

    # -- the threads ----------------------------------------------------------------------------

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # no request must wait for a thread that has ended
            self.is_dead = True
            self._hand_over(self._fail_all)
            with contextlib.suppress(OSError):  # a full disk may have been the cause
                log.critical("model_thread_died", exc_info=True)

    def _hand_over(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function on the event loop, unless that has closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _run_encoder(self, encoder: ItemEncoder, line: TokenizerLine) -> None:
        """Tokenize one piece after another until the line is stopped."""
        while (next_task := line.take()) is not None:
            self._tokenize(encoder, *next_task)
            line.put_back(next_task[0])
            del next_task  # otherwise an idle thread holds a request, up to thousands of samples

    def _encode(self, items: Sequence[Any], options: Any) -> Sequence[Encoded | SampleError | None]:
        """Tokenize items; None in the place of one to split into windows."""
        if self._has_windows and options.overlong == "windows":
            return encode_uncut(self._backend, items, options)
        return self._backend.encode(items, options)

    def _tokenize(
        self, encoder: ItemEncoder, task: TokenizeTask, samples: Sequence[InFlightSample]
    ) -> None:
        waiting = [
            (sample, item)
            for sample in samples
            if not sample.parts and (item := sample.item) is not None  # neither read nor dropped
        ]
        if not waiting:
            return
        started = time.perf_counter()
        encoded = encoder.encode([item for _, item in waiting], task.options)
        seconds = time.perf_counter() - started
        self._length_log.note(encoded)
        task.job.tokenise_s += seconds
        self._metrics.tokenise_seconds.observe(seconds)
        to_cut: list[InFlightSample] = []
        refused: list[tuple[InFlightSample, Outcome]] = []
        new: list[tuple[InFlightSample, Encoded]] = []
        for (sample, _), result in zip(waiting, encoded, strict=True):
            if result is None:
                to_cut.append(sample)
            elif isinstance(result, SampleError):
                refused.append((sample, result))
            else:
                new.append((sample, result))
        if to_cut:
            self._to_cut.put(TokenizeTask(task.job, to_cut, task.options, to_cut[0].priority))
        if refused:
            self._hand_over(self._answer, refused)
        with self.changed:
            parts: list[QueuedPart] = []
            for sample, result in new:
                if sample.waiters:  # otherwise it was dropped meanwhile
                    sample.encoded, sample.item = result, None
                    sample.parts = [
                        QueuedPart(sample, part) for part in result.windows or (result,)
                    ]
                    sample.pending_parts = len(sample.parts)
                    parts += sample.parts
            self.turns.put(parts)
            self.changed.notify_all()

    def _run_model(self) -> None:
        """Score batches until the batcher is stopped; as many threads do as there are workers."""
        model = self.model
        while (parts := self._take(PROBE_S if model.failing else None)) is not None:
            if parts:
                worker = None if self._max_busy == math.inf else BusyWorker(self._count_busy)
                try:
                    self._score(parts, worker)
                finally:
                    if worker is not None:
                        worker.release()
            elif model.failing:  # no batch arrived: probe the model
                model.failing = not model.works()
            del parts  # as in `_run_encoder`

    def _take(self, wait_s: float | None) -> list[QueuedPart] | None:
        """Wait for the next batch and return it: empty after `wait_s`, None once stopped."""
        with self.changed:
            while not self._stopped:
                if self._busy < self._max_busy:
                    parts = self.turns.take(self.model.max_tokens, time.monotonic())
                    if parts:
                        self._busy += self._max_busy != math.inf
                        return parts
                if not self.changed.wait(wait_s):
                    return []
        return None

    def _count_busy(self, change: int) -> None:
        with self.changed:
            self._busy += change
            if change < 0:
                self.changed.notify()

    def _score(self, parts: Sequence[QueuedPart], worker: BusyWorker | None) -> None:
        batch = [_with_caller(part, worker) for part in parts]
        started = time.monotonic()
        outcomes = self.model.forward(batch)
        seconds = time.monotonic() - started
        for encoded in batch:
            encoded.is_wanted = encoded.worker = None  # each refers to what refers to the item
        self._hand_over(self._deliver, parts, outcomes, started, seconds)
        self.model.note(batch, outcomes, seconds)
        for enqueued_at in {part.sample.enqueued_at for part in parts}:  # one entry per request
            self._metrics.queue_seconds.observe(max(0.0, started - enqueued_at))


def _with_caller(part: QueuedPart, worker: BusyWorker | None) -> Encoded:
    """Return the item with what `forward` may know of the requests that wait for it: the longest
    timeout, and whether there are any; and with the worker that has it."""
    sample, encoded = part.sample, part.encoded
    encoded.timeout_s = max([job.timeout_s for job in tuple(sample.waiters)], default=None)
    encoded.is_wanted = lambda: bool(sample.waiters)
    encoded.worker = worker
    return encoded


def _answer_of(outcome: Outcome, write: Callable[[dict[str, Any]], bytes]) -> Answer:
    """Return an outcome as it is cached and answered: serialized by its endpoint's `write`."""
    if isinstance(outcome, SampleError):
        return outcome
    try:
        return write(outcome)
    except Exception as error:  # a bug of a backend must not leave its requests waiting
        if isinstance(error, ValueError) and not isinstance(error, PydanticSerializationError):
            return SampleError("non_finite", "the model gave a number that is not finite")
        log.error("model_failure", exc_info=True)
        return SampleError("model_failure", "the model's answer cannot be written")


def _write_lengths(service: str, cut: int, refused: int, cut_by_name: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the tokenizer's thread
        log.warning(
            "overlong_inputs", service=service, cut=cut, refused=refused, cut_texts=cut_by_name
        )
