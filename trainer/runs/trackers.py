"""Send stats to TensorBoard and other trackers that accelerate supports, besides log.jsonl.

A tracker that fails during a run (its disk is full, its server is away) does not decide about it:
the numbers are in log.jsonl and eval.jsonl.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from scorekit.net.addresses import without_userinfo

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)
#: Failed calls by the name of the tracker, of the run of this process.
_failures: Counter[str] = Counter()

PROJECT = "scorekit"  # the folder of TensorBoard's files, the project of the others


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError at a tracker that accelerate does not support or that is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            valid_names = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"misc.trackers: {name!r} is unknown. Choose from: {valid_names}")
        if name not in installed:
            package = name.replace("_", "-")
            if name == "tensorboard":
                package = '-e ".[tensorboard]" in the checkout'
            raise UserError(
                f"misc.trackers: {name} is not installed. Run pip install {package}, or remove it"
            )


@contextmanager
def tracking(
    accelerator: Accelerator, config: Mapping[str, Any], done: int | None = None
) -> Iterator[None]:
    """Open the accelerator's trackers, if any, and close them at the end.

    The run's config becomes their hyper-parameters.
    done: the run is resumed after this update; TensorBoard drops its later steps.
    Raises UserError if one cannot be opened: nothing is trained yet.
    """
    if accelerator.log_with:
        purge = {} if done is None else {"tensorboard": {"purge_step": done + 1}}
        try:
            settings = dict(_flat(without_userinfo(config)))
            accelerator.init_trackers(PROJECT, settings, init_kwargs=purge)
        except Exception as error:  # each tracker has its own
            raise UserError(
                f"misc.trackers: not opened ({_one_line(error)}). Mend it, or remove it"
            ) from error
    _failures.clear()
    try:
        yield
    finally:
        if accelerator.log_with:
            for tracker in accelerator.trackers:
                _attempt(tracker, tracker.finish)
            accelerator.trackers = []
            accelerator.end_training()
        for name, count in _failures.items():
            log.warning("misc.trackers: %s failed %d times: it lacks numbers", name, count)


def track(accelerator: Accelerator, part: str, line: Mapping[str, Any], step: int) -> None:
    """Send the numbers of a line of log.jsonl or eval.jsonl, under `part/`.

    Values that are null or not finite are left out, because a tracker would draw them as numbers.
    A failure is logged once and counted.
    """
    values = {
        f"{part}/{key}": float(value)
        for key, value in _flat(line)
        if isinstance(value, int | float) and math.isfinite(value)
    }
    for tracker in accelerator.trackers:
        _attempt(tracker, partial(tracker.log, values, step=step))


def _attempt(tracker: Any, call: Callable[[], object]) -> None:
    """Call a tracker; log the first failure of it, and count all."""
    try:
        call()
    except Exception as error:
        if not _failures[tracker.name]:
            log.warning("misc.trackers: %s: %s; the run goes on", tracker.name, _one_line(error))
        _failures[tracker.name] += 1


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("rl.lr", 1e-6), ...: numbers, booleans and texts unchanged, other values as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            yield prefix + key, value if plain else str(value)
