"""The base of the backends of a local model: its name, its device, and how settings describe it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from scorekit.matmul import check_matmul, pack_linear_layers, resolve_matmul
from scorekit.server.device import check_dtype, device_memory_bytes, prepare_device
from scorekit.server.http.settings import ServiceSettings

if TYPE_CHECKING:
    import torch


class ModelOptions(TypedDict, total=False):
    """Options of every local model.

    revision: of a hub id. device: auto, cpu, cuda, cuda:N. dtype: data type of the weights.
    threads: CPU threads; None: what this process may use. matmul: auto, torch or onednn, see
    `scorekit.matmul`; None: what SCOREKIT_MATMUL says, else auto.
    """

    revision: str | None
    device: str
    dtype: str
    threads: int | None
    matmul: str | None


class CheckpointBackend:
    """A model from a local folder or a hub id, on one device. model: the folder or the id."""

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
