"""Checkpoints of transformers' Trainer, and so of TRL's, in the form of every run: whole, sealed,
under their name all at once (trainer/runs/checkpoints/checkpoint.py)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scorekit.files import naming, put_folder, temporary_of
from trainer.runs.checkpoints.checkpoint import (
    State,
    prune_checkpoints,
    save_readers,
    seal_checkpoint,
)

#: What is written that a checkpoint does not need; the first is a pickle.
_LEFT_OUT = ("training_args.bin", "README.md")


class SealedCheckpoints:
    """Stands before the trainer among the bases of a class. `keep_in` is to be called before the
    first checkpoint."""

    state: Any
    processing_class: Any
    #: The newest checkpoint of this process.
    saved: Path | None = None

    def keep_in(self, folder: Path, keep: int, state_of: Callable[[int], State]) -> None:
        """folder: of the checkpoints, of which the newest `keep` stay, and the best. state_of: what
        state.json says after an update, but its files."""
        self._checkpoints, self._keep, self._state_of = folder, keep, state_of
        self._partial = temporary_of(folder / "step")

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes: beside the checkpoint's place, until it is whole."""
        return str(self._partial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Transformers' checkpoint, sealed."""
        update = self.state.global_step
        written = self._partial / f"checkpoint-{update}"
        place = self._checkpoints / f"step-{update:06d}"
        try:
            with naming(place):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the trainer's
                save_readers(model, self.processing_class, written)
                for name in _LEFT_OUT:
                    (written / name).unlink(missing_ok=True)
                seal_checkpoint(written, self._state_of(update))
                put_folder(written, place)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
        self.saved = place
        prune_checkpoints(self._checkpoints, self._keep)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: a run's folder has a report."""
