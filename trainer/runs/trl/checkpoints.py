"""Checkpoints of transformers' and TRL's trainers in the format of every run.

They are complete, have digests, and appear under their name by a rename
(trainer/runs/checkpoints/checkpoint.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scorekit.files import put_folder, temporary_of, with_path_in_error
from trainer.rl.model_files import add_older_keys
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    finalize_checkpoint,
    prune_checkpoints,
    save_processors,
)

#: Files that a checkpoint does not need; the first is a pickle.
_LEFT_OUT = ("training_args.bin", "README.md")


class TrlCheckpointMixin:
    """A mixin, listed before the trainer among the bases of a class.

    Call `connect` before the first update.
    """

    state: Any
    control: Any
    processing_class: Any
    #: The newest checkpoint of this process.
    saved: Path | None = None

    def connect(
        self,
        folder: Path,
        keep: int,
        state_of: Callable[[int], CheckpointState],
        evaluate_update: Callable[[int], dict[str, Any]],
    ) -> None:
        """Set where checkpoints are written, and how the policy is evaluated.

        folder: of the checkpoints, of which the newest `keep` and the best are retained.
        state_of: returns the state after an update, without the files.
        evaluate_update: evaluates the policy after an update.
        """
        self._checkpoints, self._keep, self._state_of = folder, keep, state_of
        self._partial = temporary_of(folder / "step")
        self._evaluate_update = evaluate_update

    def evaluate(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Run our evaluation instead of TRL's."""
        self.control.should_evaluate = False
        return self._evaluate_update(self.state.global_step)

    def folder_of(self, update: int) -> Path:
        """Return the folder of a checkpoint."""
        return self._checkpoints / f"step-{update:06d}"

    def _get_output_dir(self, trial: Any) -> str:
        """Return a temporary folder, where transformers writes until the checkpoint is complete."""
        return str(self._partial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write transformers' checkpoint and its digests."""
        update = self.state.global_step
        written = self._partial / f"checkpoint-{update}"
        target = self.folder_of(update)
        try:
            with with_path_in_error(target):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the trainer's
                add_older_keys(written)
                save_processors(model, self.processing_class, written)
                for name in _LEFT_OUT:
                    (written / name).unlink(missing_ok=True)
                finalize_checkpoint(written, self._state_of(update))
                put_folder(written, target)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
        self.saved = target
        prune_checkpoints(self._checkpoints, self._keep)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no model card: the run directory has a report."""
