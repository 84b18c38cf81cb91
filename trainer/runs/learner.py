"""What learns in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer.rl.policy import Reference
from trainer.rl.world import World
from trainer.runs.checkpoints.resume import Origin


@dataclass(slots=True)
class Learner:
    """A policy that learns.

    reference: None where nothing is held to one. train, sets: the prompts to learn from, and those
    of each evaluation set, as the task has them. origin: what the run is made of; going on needs
    the same. never: ids that the sampler does not draw.
    """

    model: nn.Module
    tokenizer: Any
    pad_id: int
    reference: Reference | None
    optimizer: Any
    train: list[Any]
    sets: dict[str, list[Any]]
    origin: Origin
    never: Sequence[int] = ()

    def share(self, world: World) -> None:
        """Spread model and optimiser over the processes; every process has to call it."""
        self.model, self.optimizer = world.prepare(self.model, self.optimizer)
