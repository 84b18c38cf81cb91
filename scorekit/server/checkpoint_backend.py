"""The base of the backends of a local model: its name, its device, and how settings describe it."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from scorekit.errors import UserError
from scorekit.matmul import check_matmul, pack_linear_layers, resolve_matmul
from scorekit.processes import usable_cpus
from scorekit.server.settings import ServiceSettings

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


def token_positions(network: Any) -> int | None:
    """Return how many token positions a network has; None if it has no limit.

    RoBERTa models begin after the padding index; their config counts all rows."""
    config = network.config.get_text_config()
    num_positions: int | None = getattr(config, "max_position_embeddings", None)
    embeddings = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    if num_positions is None or padding_idx is None:
        return num_positions
    return int(num_positions - padding_idx - 1)


class ModelOptions(TypedDict, total=False):
    """Options of every local model.

    revision: of a hub id.
    device: auto, cpu, cuda, cuda:N.
    dtype: data type of the weights.
    threads: CPU threads; None: what this process may use.
    matmul: auto, torch or onednn, see `scorekit.matmul`; None: what SCOREKIT_MATMUL says, else
    auto.
    """

    revision: str | None
    device: str
    dtype: str
    threads: int | None
    matmul: str | None


class CheckpointBackend:
    """A model from a local folder or a hub id, on one device.

    model: the folder or the id.
    """

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        self._model_name = model
        self._revision = options.get("revision")
        self._dtype_name = options.get("dtype", "float32")
        self._device_name = options.get("device", "auto")
        self._threads = options.get("threads")
        self._matmul_setting = options.get("matmul")
        self._matmul = "torch"
        self._device: torch.device | None = None

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> Self:
        """Return the backend that the settings describe, from the settings of its arguments' names.

        Its files are checked, but not loaded yet. Raises UserError as `check`.
        """
        names = {*inspect.signature(cls).parameters, *ModelOptions.__annotations__}
        backend = cls(**settings.model_dump(include=names))
        backend.check()
        return backend

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Loads nothing."""
        check_dtype(self._dtype_name)
        check_matmul(self._matmul_setting, self._dtype_name)

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return the device's memory in bytes (current, peak, total); None on a CPU."""
        return device_memory_bytes(self._device)

    def _prepare_device(self) -> torch.device:
        self._device = prepare_device(self._device_name, self._threads)
        self._matmul = resolve_matmul(self._matmul_setting, self._device, self._dtype_name)
        return self._device

    def _pack(self, network: torch.nn.Module) -> None:
        """Pack the linear layers of a network that has been loaded, if oneDNN multiplies."""
        if self._matmul == "onednn":
            pack_linear_layers(network)
