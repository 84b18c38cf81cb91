"""Set up the device of a model: device name, threads, dtype and memory."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING

from scorekit.errors import UserError
from scorekit.processes import usable_cpus

if TYPE_CHECKING:
    import torch


def prepare_device(name: str, threads: int | None) -> torch.device:
    """Return the device of that name (auto: the first GPU, else the CPU); sets torch's threads.

    Raises UserError if the device does not exist.
    """
    import torch

    _keep_freed_memory()
    # torch counts the host's cores, even with a cgroup limit. Too many threads are slower.
    threads = threads or usable_cpus()
    torch.set_num_threads(threads)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # of the tokenizers
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name}: give auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def check_dtype(name: str) -> None:
    """Raise UserError if it is not a dtype of weights."""
    if name not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {name}: give float32, bfloat16 or float16")


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next batch. By default it returns the memory to the
    system, and every new page costs time."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    for name, value in ((trim_threshold, 2**30), (top_pad, 2**26), (mmap_threshold, 2**25)):
        libc.mallopt(name, value)


def device_memory_bytes(device: torch.device | None) -> tuple[int, int, int] | None:
    """Return bytes of a CUDA device: allocated by tensors now, at the peak, and in total.

    None for another device."""
    import torch

    if device is None or device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), total
