"""The device of a run, and the data type of its arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from scorekit.errors import UserError


def pick_device(name: str) -> torch.device:
    """Return the device; `auto` is a GPU if there is one. Raises UserError if it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"misc.device: {name!r}: {str(error).splitlines()[0]}") from None
    return device


def prepare_torch(device: str, threads: int | None) -> torch.device:
    """Set the number of threads (None: no change) and return the device."""
    if threads is not None:
        torch.set_num_threads(threads)
    return pick_device(device)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Compute in `dtype`; weights, log-probabilities and optimizer state stay float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def current_autocast() -> AbstractContextManager[Any]:
    """Return a context that gives another thread the autocast state that this one has now."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, torch.get_autocast_dtype(kind))
    return nullcontext()
