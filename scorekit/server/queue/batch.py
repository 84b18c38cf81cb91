"""Cut samples into batches, and score a batch even if the model fails for some samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import structlog

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded, Outcome

log = structlog.get_logger()

Forward = Callable[[Sequence[Encoded]], list[Outcome]]
#: Returns the error of an invalid outcome: `Endpoint.outcome_error`.
Check = Callable[[dict[str, Any]], SampleError | None]


class DeviceLost(Exception):
    """Raised if the device is lost for this process; only a new process can use it."""


def default_batch_tokens(device: str) -> int:
    """Return the default number of padded tokens of a batch.

    On a CPU a small batch wastes less padding and fits the caches; a GPU needs a large one."""
    return 256 if device == "cpu" else 16384


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


def make_cheapest_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int, batch_cost: float
) -> list[list[int]]:
    """Return the cheapest cut into batches. A batch costs its padded tokens plus `batch_cost`.

    Use it for few samples: its time grows with their number times the samples of a batch.

    lengths and the result are as for `make_batches`, but any batch may be below the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i][0])
    one_batch_cost = lengths[order[0]][0] * sum(rows for _, rows in lengths)
    if (
        one_batch_cost <= max_tokens
        and one_batch_cost - sum(n * rows for n, rows in lengths) <= batch_cost
    ):
        return [order]  # a second batch would cost more than it saves
    min_costs = [0.0] + [math.inf] * len(order)  # by the number of samples
    last_begins = [0] * (len(order) + 1)  # start of the last batch of these samples
    for begin, first in enumerate(order):
        longest, rows = lengths[first][0], 0
        for end in range(begin + 1, len(order) + 1):
            rows += lengths[order[end - 1]][1]
            if longest * rows > max_tokens and end > begin + 1:
                break
            cost = min_costs[begin] + batch_cost + longest * rows
            if cost < min_costs[end]:
                min_costs[end], last_begins[end] = cost, begin
    batches = []
    end = len(order)
    while end:
        batches.append(order[last_begins[end] : end])
        end = last_begins[end]
    return batches[::-1]


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
