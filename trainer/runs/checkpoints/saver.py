"""Save and load the checkpoints of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.rl.distributed import DistributedContext
from trainer.rl.policy import unwrap_distributed
from trainer.rl.update import learning_rate
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    load_checkpoint,
    load_optimizer_state,
    prune_checkpoints,
    random_state,
    save_checkpoint,
    set_random_state,
)
from trainer.runs.checkpoints.resume import Origin, check_origin
from trainer.runs.config import RunConfig
from trainer.runs.evaluation.files import EvaluationReport

log = logging.getLogger(__name__)


class Saver:
    """Saves and loads the checkpoints of a run with this `origin`."""

    def __init__(self, cfg: RunConfig, world: DistributedContext, origin: Origin) -> None:
        self.cfg, self.world, self.origin = cfg, world, origin
        self.folder = Path(cfg.misc.run_dir) / "checkpoints"

    def is_due(self, update: int, reports: Sequence[tuple[int, EvaluationReport]]) -> bool:
        """Return whether to save: each save_every_n_updates, and at the best evaluation so far."""
        every = self.cfg.misc.save_every_n_updates
        rated = {u: r.rating for u, r in reports if u > 0 and r.rating is not None}
        is_best = update in rated and rated[update] >= max(rated.values())
        return every > 0 and (update % every == 0 or is_best)

    def save(
        self,
        update: int,
        report: EvaluationReport | None,
        model: nn.Module,
        tokenizer: Any,
        optimizer: Any,
    ) -> Path:
        """Write a checkpoint after `update` updates; every process has to call it.

        report: of the set that the best checkpoint is chosen by, if it was evaluated.
        """
        rl = self.cfg.rl
        reward = report.rating if report else None
        if report and reward is None and self.world.is_main:
            log.warning(
                "step %d cannot be the best checkpoint: its evaluation scored %.0f %% of %d "
                "examples, and its mean is not comparable",
                update,
                100 * report.reward_coverage,
                report.samples,
            )
        state = CheckpointState(
            update,
            config=self.cfg.model_dump(mode="json"),
            prompts_seen=update * rl.batch_size * rl.grad_accum,
            learning_rate=learning_rate(update - 1, rl),
            reward=reward,
            rated_by=self.cfg.best_by,
            origin=self.origin,
            processes=self.world.size,
        )
        weights, optimizer_state = self.world.full_state_dicts(model, optimizer)
        random_states = self.world.gather([random_state()])
        path = self.folder / f"step-{update:06d}"
        if self.world.is_main:
            save_checkpoint(
                path,
                unwrap_distributed(model),
                tokenizer,
                optimizer_state,
                state,
                weights=weights,
                random_states=random_states,
            )
            prune_checkpoints(self.folder, self.cfg.misc.keep_checkpoints)
        self.world.wait()
        return path

    def load_weights(self, checkpoint: Path, model: nn.Module) -> int:
        """Load weights into a model that is not distributed yet; return the updates done.

        Raises UserError if the run would be resumed with other inputs than it started with.
        """
        state = load_checkpoint(checkpoint, model)
        check_origin(self.origin, state)
        if not self.world.is_main:
            return state.update
        if state.processes != self.world.size:
            log.warning(
                "the run had %d processes and has %d now. Its samples will differ.",
                state.processes,
                self.world.size,
            )
        log.warning("%s is resumed after update %d", self.cfg.misc.run_dir, state.update)
        return state.update

    def load_rest(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Load the optimizer's state and the random states."""
        self.world.load_optimizer(model, optimizer, load_optimizer_state(checkpoint))
        set_random_state(checkpoint, self.world.rank)
