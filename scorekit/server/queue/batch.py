"""One batch: which samples go into it, and how it is scored whatever goes wrong."""

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
#: Why the fields of an outcome are no good one: `Endpoint.outcome_error`.
Check = Callable[[dict[str, Any]], SampleError | None]


class DeviceLost(Exception):
    """The device gives no answers any more in this process; only a new one can go on."""


def default_batch_tokens(device: str) -> int:
    """Padded tokens of a batch where nobody says: on a CPU a small batch wastes less on padding and
    stays in the caches, a GPU wants a large one."""
    return 256 if device == "cpu" else 16384


def make_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int, max_items: int | None = None
) -> list[list[int]]:
    """Cut samples into batches of similar length under a budget of padded tokens.

    lengths: (length, rows) of each sample; a batch costs its longest length times its rows.
    Returns lists of indexes, longest samples first; only the last batch has room left. A sample
    over the budget gets its own batch.
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
    """The cut into batches that costs least, where each costs its padded tokens and `batch_cost`
    tokens more. For few samples: the time grows with their number times that of a batch.

    lengths, and what is returned: as for `cut_batches`, but any batch may have room left.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i][0])
    whole = lengths[order[0]][0] * sum(rows for _, rows in lengths)
    if whole <= max_tokens and whole - sum(n * rows for n, rows in lengths) <= batch_cost:
        return [order]  # no cut saves what another batch costs
    least = [0.0] + [math.inf] * len(order)  # of the first k samples
    begins = [0] * (len(order) + 1)  # where the last batch of these begins
    for begin, first in enumerate(order):
        longest, rows = lengths[first][0], 0
        for end in range(begin + 1, len(order) + 1):
            rows += lengths[order[end - 1]][1]
            if longest * rows > max_tokens and end > begin + 1:
                break
            cost = least[begin] + batch_cost + longest * rows
            if cost < least[end]:
                least[end], begins[end] = cost, begin
    batches = []
    end = len(order)
    while end:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def padded_tokens(batch: Sequence[Encoded]) -> int:
    """Tokens that the model reads for a batch, padding included."""
    return max(e.length for e in batch) * sum(e.rows for e in batch)


def run_batch(
    forward: Forward,
    batch: Sequence[Encoded],
    check: Check,
    on_out_of_memory: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Outcomes of a batch, in order; each has what its input tells, too, or is why there is none.

    A batch that raises, or does not fit the memory, is halved until the culprit is alone, so that
    a bad sample fails alone. What `check` finds in an outcome is a failure of its sample.

    on_out_of_memory is told the padded tokens of a batch that did not fit. Raises DeviceLost.
    """
    outcomes, fault = _try_forward(forward, batch, check)
    if fault is None:
        return outcomes
    # The exception is gone by now, and with it the memory that its frames held.
    if fault == "out of memory":
        release_device_memory()
        if on_out_of_memory is not None:
            on_out_of_memory(padded_tokens(batch))
    if len(batch) == 1:
        return [SampleError("model_failure", f"the model failed: {fault}")]
    half = len(batch) // 2
    first = run_batch(forward, batch[:half], check, on_out_of_memory)
    return first + run_batch(forward, batch[half:], check, on_out_of_memory)


def _try_forward(
    forward: Forward, batch: Sequence[Encoded], check: Check
) -> tuple[list[Outcome], str | None]:
    """Outcomes, or what went wrong: "out of memory", else the name of what was raised."""
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
    """Whether some sample may be to blame: any Exception, and a panic of the Rust tokenizers, which
    is none. The rest ends the thread."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def has_failed(outcome: Outcome) -> bool:
    """Whether the model raised for this sample alone."""
    return isinstance(outcome, SampleError) and outcome.type == "model_failure"


def device_error_kind(error: BaseException) -> Literal["memory", "fatal", "other"]:
    """What an exception of `forward` says of the device, by its name and words, so that no torch
    is needed to ask. After a CUDA error every later call of the process fails too."""
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
    """Give the device's cached blocks back, so that a smaller batch may find room."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
