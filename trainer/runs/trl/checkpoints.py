"""Checkpoints of transformers' and TRL's trainers in the format of every run.

They are complete, have digests, and appear under their name by a rename
(trainer/runs/checkpoints/checkpoint.py).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scorekit.files import put_folder, temporary_of, with_path_in_error
from trainer.rl.distributed import DistributedContext
from trainer.rl.model_files import add_older_keys
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    finalize_checkpoint,
    load_checkpoint,
    load_optimizer_state,
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
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    #: The newest checkpoint of this process.
    saved: Path | None = None

    def connect(
        self,
        folder: Path,
        keep: int,
        state_of: Callable[[int], CheckpointState],
        evaluate_update: Callable[[int], dict[str, Any]],
        world: DistributedContext,
    ) -> None:
        """Set where checkpoints are written, and how the policy is evaluated.

        folder: of the checkpoints, of which the newest `keep` and the best are retained.
        state_of: returns the state after an update, without the files.
        evaluate_update: evaluates the policy after an update.
        world: the processes of the run, which all call these methods; the main one writes.
        """
        self._world = world
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
        update, world = self.state.global_step, self._world
        target = self.folder_of(update)
        world.set_phase(f"update {update}, checkpoint")
        try:
            with with_path_in_error(target):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the trainer's
                if world.is_main:
                    self._finalize(self._partial / f"checkpoint-{update}", target, model)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
        world.barrier()
        self.saved = target

    def _finalize(self, written: Path, target: Path, model: Any) -> None:
        """Complete what transformers has written, and give it its name."""
        add_older_keys(written)
        save_processors(model, self.processing_class, written)
        for name in _LEFT_OUT:
            (written / name).unlink(missing_ok=True)
        finalize_checkpoint(written, self._state_of(self.state.global_step))
        put_folder(written, target)
        prune_checkpoints(self._checkpoints, self._keep)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states of all processes on the main one.

        So no other host has to see the folder.
        """
        save = super()._save_rng_state  # type: ignore[misc]  # the trainer's
        if self._world.size == 1:
            save(output_dir)
            return
        with tempfile.TemporaryDirectory() as folder:
            save(folder)
            files = [(path.name, path.read_bytes()) for path in Path(folder).iterdir()]
        files = self._world.gather(files)
        for name, content in files if self._world.is_main else ():
            Path(output_dir, name).write_bytes(content)

    # transformers has a format of its own for sharded weights, which nothing else loads

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights; sharded ones as if they were not."""
        if self._world.is_sharded:
            weights = self._world.full_weights(self.model)
            self._save(output_dir, state_dict=weights)  # type: ignore[attr-defined]
        else:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._world.is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        optimizer_state = self._world.full_optimizer_state(self.model, self.optimizer)
        if self._world.is_main:
            torch.save(optimizer_state, Path(output_dir, "optimizer.pt"))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def load_weights(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights into a model that is not distributed yet."""
        load_checkpoint(checkpoint, self.model)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if not self._world.is_sharded:  # else `load_weights` has done it
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._world.is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        saved = load_optimizer_state(Path(checkpoint))
        self._world.load_optimizer(self.model, self.optimizer, saved)
        scheduler = Path(checkpoint, "scheduler.pt")
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no model card: the run directory has a report."""
