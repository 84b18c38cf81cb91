"""Weights that vLLM servers load: their folders, and the requests that still need them."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scorekit.files import allow_readers
from trainer.rl.distributed import DistributedContext
from trainer.rl.model_files import save_model
from trainer.rl.policy import unwrap_distributed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one update.

    model: the name to sample from.
    version: unique for these weights, over all runs (`version_label`).
    update: the number of updates behind them.
    """

    model: str
    folder: Path
    version: str
    update: int


class WeightUses:
    """Counts the requests of this process that need each version, and finds those not needed."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.retired: list[Weights] = []
        self.on_release: Callable[[], None] = lambda: None

    @contextmanager
    def using(self, weights: Weights) -> Iterator[None]:
        """Keep these weights within."""
        self._counts[weights.version] += 1
        try:
            yield
        finally:
            self._counts[weights.version] -= 1
            if not self._counts[weights.version]:
                del self._counts[weights.version]
                self.on_release()

    @property
    def versions(self) -> set[str]:
        """Return the versions that requests need now."""
        return set(self._counts)

    def take_unneeded(self, needed_versions: set[str]) -> list[Weights]:
        """Return the retired weights that are not among these, and forget them."""
        unneeded = [w for w in self.retired if w.version not in needed_versions]
        self.retired = [w for w in self.retired if w.version in needed_versions]
        return unneeded


def save_weights(
    model: nn.Module, folder: Path, world: DistributedContext, *, adapters: bool
) -> None:
    """Write the weights as a folder that appears complete, by a rename.

    Every process calls it, and the main one writes.
    """
    bare: Any = unwrap_distributed(model)
    options: dict[str, Any] = {}
    if world.is_sharded:  # every process takes part
        options["state_dict"] = world.full_weights(model)
    if not world.is_main:
        return
    if adapters:
        options["save_embedding_layers"] = False
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(bare, partial, **options)
    allow_readers(partial)  # vLLM may run under another user
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def clean(folder: Path) -> None:
    """Remove weight folders of a run that was killed; other folders are left alone."""
    for stale_dir in [*folder.glob("update-*-*"), *folder.glob(".update-*-*.partial")]:
        if stale_dir.is_dir() and not stale_dir.is_symlink():
            log.info("removing %s, which an earlier start left", stale_dir)
            shutil.rmtree(stale_dir, ignore_errors=True)
    with suppress(OSError):  # the folder does not exist, or has other files
        folder.rmdir()
