"""Send stats to TensorBoard and other trackers that accelerate supports, besides log.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

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
    """
    if accelerator.log_with:
        purge = {} if done is None else {"tensorboard": {"purge_step": done + 1}}
        accelerator.init_trackers(PROJECT, dict(_flat(config)), init_kwargs=purge)
    try:
        yield
    finally:
        if accelerator.log_with:
            accelerator.end_training()


def track(accelerator: Accelerator, part: str, line: Mapping[str, Any], step: int) -> None:
    """Send the numbers of a line of log.jsonl or eval.jsonl, under `part/`.

    Values that are null or not finite are left out, because a tracker would draw them as numbers.
    """
    accelerator.log(
        {
            f"{part}/{key}": float(value)
            for key, value in _flat(line)
            if isinstance(value, int | float) and math.isfinite(value)
        },
        step=step,
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("rl.lr", 1e-6), ...: numbers, booleans and texts unchanged, other values as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            yield prefix + key, value if plain else str(value)
