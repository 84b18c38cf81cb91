"""Cut samples into batches, run them on the model, and predict how long that takes.

A batch is scored even if the model fails for some of its samples. Nothing here knows requests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import structlog

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import Backend, Encoded, Outcome, workers_of
from scorekit.server.endpoint import ModelDescription
from scorekit.server.metrics import Metrics
from scorekit.server.settings import ServiceSettings

log = structlog.get_logger()

Forward = Callable[[Sequence[Encoded]], list[Outcome]]
#: Tokenizes items; None in the place of one to split into windows.
Encode = Callable[[Sequence[Any], Any], Sequence[Encoded | SampleError | None]]
#: Returns the error of an invalid outcome: `Endpoint.outcome_error`.
Check = Callable[[dict[str, Any]], SampleError | None]
#: Weight of earlier batches at each new one: about the last twenty count.
_DECAY = 0.95
#: A batch is stalled after this many times its predicted seconds, but not before `_MIN_STALL_S`.
_STALL_FACTOR, _MIN_STALL_S = 5.0, 5.0


class DeviceLost(Exception):
    """Raised if the device is lost for this process; only a new process can use it."""


def default_batch_tokens(description: ModelDescription) -> int:
    """Return the default number of padded tokens of a batch.

    On a CPU a small batch wastes less padding and fits the caches; a GPU needs a large one."""
    if description.batch_tokens is not None:
        return description.batch_tokens
    return 256 if description.device == "cpu" else 16384


def make_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int, max_items: int | None = None
) -> list[list[int]]:
    """Cut samples into batches of similar length under a budget of padded tokens.

    lengths: (length, rows) of each sample; a batch costs its longest length times its rows.
    Returns lists of indexes, longest samples first; only the last batch may be below the budget. A
    sample over the budget gets its own batch.
    """
    batches: list[list[int]] = []
    longest = rows = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i][0]):
        length, own_rows = lengths[index]
        full = longest * (rows + own_rows) > max_tokens or (
            max_items is not None and batches and len(batches[-1]) >= max_items
        )
        if not batches or full:
            batches.append([])
            longest, rows = length, 0
        batches[-1].append(index)
        rows += own_rows
    return batches


def padded_tokens(batch: Sequence[Encoded]) -> int:
    """Return the tokens that the model reads for a batch, including padding."""
    return max(e.length for e in batch) * sum(e.rows for e in batch)


def run_batch(
    forward: Forward,
    batch: Sequence[Encoded],
    check: Check,
    on_out_of_memory: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Return the outcomes of a batch, in order, with the fields of the encoded inputs.

    A batch that raises or does not fit the memory is halved repeatedly, so that a bad sample fails
    alone. An error from `check` is a failure of its sample.

    on_out_of_memory: called with the padded tokens of a batch that did not fit. Raises DeviceLost.
    """
    outcomes, reason = _try_forward(forward, batch, check)
    if reason is None:
        return outcomes
    # Here the exception is deleted, so the memory of its frames is free.
    if reason == "out of memory":
        release_device_memory()
        if on_out_of_memory is not None:
            on_out_of_memory(padded_tokens(batch))
    if len(batch) == 1:
        return [SampleError("model_failure", f"the model failed: {reason}")]
    half = len(batch) // 2
    first = run_batch(forward, batch[:half], check, on_out_of_memory)
    return first + run_batch(forward, batch[half:], check, on_out_of_memory)


def _try_forward(
    forward: Forward, batch: Sequence[Encoded], check: Check
) -> tuple[list[Outcome], str | None]:
    """Return (outcomes, None), or ([], reason): "out of memory" or the name of the exception."""
    try:
        outcomes = forward(batch)
        if len(outcomes) != len(batch):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} samples")
        return [_finish(*pair, check) for pair in zip(batch, outcomes, strict=True)], None
    except BaseException as error:
        if not may_be_sample_error(error):
            raise
        kind = device_error_kind(error)
        if kind == "fatal":
            raise DeviceLost(type(error).__name__) from error
        if len(batch) == 1:
            log.error("model_failure", exc_info=True)
        return [], "out of memory" if kind == "memory" else type(error).__name__


def _finish(encoded: Encoded, outcome: Outcome, check: Check) -> Outcome:
    if isinstance(outcome, SampleError):
        return outcome
    return check(outcome) or {**outcome, **encoded.fields}


def may_be_sample_error(error: BaseException) -> bool:
    """Return True if a sample may have caused the error; other errors end the thread.

    That is any Exception, and a panic of the Rust tokenizers, which is a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def has_failed(outcome: Outcome) -> bool:
    """Return True if the model raised for this sample alone."""
    return isinstance(outcome, SampleError) and outcome.type == "model_failure"


def device_error_kind(error: BaseException) -> Literal["memory", "fatal", "other"]:
    """Return the kind of an exception of `forward`: out of memory, a lost device, or another.

    It uses names and messages, so that torch need not be imported. After a CUDA error ("fatal")
    every later call of the process fails, too."""
    names = {base.__name__ for base in type(error).__mro__}
    text = str(error)
    if names & {"MemoryError", "OutOfMemoryError"} or any(
        words in text
        for words in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    ):
        return "memory"
    if "AcceleratorError" in names or "CUDA error" in text or "device-side assert" in text:
        return "fatal"
    return "other"


def release_device_memory() -> None:
    """Release the cached blocks of the device, so that a smaller batch may fit."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class BatchTimeModel:
    """Predicts the seconds of a batch from its padded tokens: a line fitted to the latest batches.

    Only the thread that makes the calls, or its `workers` threads, write it; other threads ask.
    """

    def __init__(self, stall_after_s: float | None, workers: int = 1) -> None:
        self._stall_after_s = stall_after_s
        self._workers = workers
        # Sums of 1, n, s, n*n, n*s. If two workers update them at once, one update may be lost.
        self._sums = [0.0] * 5
        # Thread -> (start, max seconds). Each thread writes its own; copying a dict is atomic.
        self._running: dict[int, tuple[float, float]] = {}
        self.samples_per_s = 0.0

    def begin(self, tokens: int) -> None:
        """Note that a call of the model begins."""
        limit = self._stall_after_s or max(_MIN_STALL_S, _STALL_FACTOR * self.predict(tokens))
        self._running[threading.get_ident()] = (time.monotonic(), limit)

    def end(self) -> float:
        """Note that the call has ended; return its seconds."""
        return time.monotonic() - self._running.pop(threading.get_ident())[0]

    def observe(self, tokens: int, samples: int, seconds: float) -> None:
        """Add the duration of a batch of so many padded tokens and samples."""
        terms = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]
        rate = self._workers * samples / max(seconds, 1e-6)
        self.samples_per_s = 0.8 * self.samples_per_s + 0.2 * rate if self.samples_per_s else rate

    def predict(self, tokens: int) -> float:
        """Return the predicted seconds of a batch of so many padded tokens; 0 before the first."""
        count, n, s, nn, ns = self._sums
        if not count:
            return 0.0
        mean_n, mean_s = n / count, s / count
        variance = nn / count - mean_n**2
        # Batches of one size give no slope: assume that time grows with the tokens.
        if variance <= 1e-3 * mean_n**2:
            return mean_s * max(1.0, tokens / mean_n)
        slope = max(0.0, (ns / count - mean_n * mean_s) / variance)
        return max(mean_s + slope * (tokens - mean_n), mean_s * min(1.0, tokens / mean_n))

    def is_stalled(self) -> bool:
        """Return True if a running call takes longer than a working model would."""
        now = time.monotonic()
        return any(now - started > limit for started, limit in self._running.copy().values())


class ItemEncoder:
    """Tokenizes items, so that only a faulty one fails.

    encode: tokenizes; None in the place of an item to split into windows.
    stall_after_s: seconds in one call after which it counts as hanging.

    Owner: its thread; others ask `timing`.
    """

    def __init__(self, encode: Encode, stall_after_s: float) -> None:
        self._encode_all = encode
        self.timing = BatchTimeModel(stall_after_s)

    def encode(self, items: Sequence[Any], options: Any) -> Sequence[Encoded | SampleError | None]:
        """Tokenize; if that raises, one by one."""
        self.timing.begin(0)
        try:
            return self._encode_all(items, options)
        except BaseException as error:
            if not may_be_sample_error(error):
                raise
            if len(items) == 1:
                log.error("tokenise_failure", exc_info=True)
                return [SampleError("model_failure", "the text could not be tokenised")]
        finally:
            self.timing.end()
        return [self.encode([item], options)[0] for item in items]


class ModelRunner:
    """Runs a backend's batches, and says whether it works.

    max_tokens: most padded tokens of a batch, once it is warm.
    in_items: a batch is counted in samples.
    failing: the last batch failed, and so did a plain text.

    Owner: the threads of the model; others read `max_tokens` and `failing`.
    """

    def __init__(self, backend: Backend, settings: ServiceSettings, metrics: Metrics) -> None:
        self._backend = backend
        self._check = backend.endpoint.outcome_error
        self._settings = settings
        self._metrics = metrics
        self.timing = BatchTimeModel(settings.stall_after, workers_of(backend))
        self.max_tokens = self._first_budget = 0
        self.in_items = False
        self.failing = False

    def warm_up(self, description: ModelDescription) -> None:
        """Run the largest possible batch before the threads start.

        Then the first request is as fast as the others, and missing memory is detected now.

        Raises UserError if the batch does not fit, or if a plain text gets no outcome."""
        endpoint = self._backend.endpoint
        options = endpoint.default_options(description)
        budget = self._settings.max_batch_tokens or default_batch_tokens(description)
        self.max_tokens = self._first_budget = budget
        longest = self._probe(description.max_input_length, options)
        self._plain_item = self._probe(4, options)
        self.in_items = longest.length == 1
        batch = [longest] * max(1, budget // (longest.length * longest.rows))
        tokens = padded_tokens(batch)
        started = time.monotonic()
        try:
            self._backend.forward(batch)
        except Exception as error:
            if device_error_kind(error) != "memory":
                raise
            raise UserError(
                f"--max-batch-tokens {budget}: a batch of {tokens} tokens does not fit the "
                f"memory of {description.device}; name fewer"
            ) from None
        seconds = time.monotonic() - started
        # The first run also compiled kernels and touched new memory, so measure a second one.
        if seconds < 10.0:
            started = time.monotonic()
            self._backend.forward(batch)
            seconds = time.monotonic() - started
        self.timing.observe(tokens, len(batch), seconds)
        (outcome,) = run_batch(self._backend.forward, [self._plain_item], self._check)
        if isinstance(outcome, SampleError):
            raise UserError(
                f"the model does not {endpoint.name} a plain text ({outcome}): try another dtype"
            )
        log.info("warm", batch_tokens=tokens, samples=len(batch), seconds=round(seconds, 3))

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the outcomes of a batch, as `run_batch`; its budget shrinks if memory is short."""
        return run_batch(self._forward, batch, self._check, self._shrink)

    def note(self, batch: Sequence[Encoded], outcomes: Sequence[Outcome], seconds: float) -> None:
        """Note a batch that was scored; if all of it failed, ask the model for a plain text."""
        if not any(map(has_failed, outcomes)):  # otherwise parts of it ran several times
            self.timing.observe(padded_tokens(batch), len(batch), seconds)
        # The texts may be the reason, too.
        self.failing = all(map(has_failed, outcomes)) and not self.works()
        metrics = self._metrics
        metrics.model_seconds.observe(seconds)
        metrics.batch_samples.observe(len(batch))
        real = sum(e.fields.get("tokens", e.length) for e in batch)
        metrics.tokens.inc(real)
        metrics.padding_tokens.inc(max(0, padded_tokens(batch) - real))

    def works(self) -> bool:
        """Return True if the model gives an outcome for a plain text."""
        (outcome,) = run_batch(self._forward, [self._plain_item], self._check)
        return not isinstance(outcome, SampleError)

    def _forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        self.timing.begin(padded_tokens(batch))
        try:
            return self._backend.forward(batch)
        finally:
            self.timing.end()

    def _shrink(self, tokens: int) -> None:
        """Halve the batch size, because a batch of so many tokens did not fit."""
        # At least an eighth of the first size: after a temporary shortage, or a single large
        # sample, batches must not stay tiny forever.
        budget = max(1, self._first_budget // 8, min(tokens, self.max_tokens) // 2)
        log.warning("out_of_memory", batch_tokens=tokens, max_batch_tokens=budget)
        self.max_tokens = budget

    def _probe(self, words: int, options: Any) -> Encoded:
        (encoded,) = self._backend.encode([self._backend.probe(words)], options)
        if isinstance(encoded, SampleError):
            raise encoded
        return encoded
