"""The batch of an update, and the protocol of what collects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from scorekit.seeds import stream_seed
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler
from trainer.runs.run_log import PhaseTimer

R = TypeVar("R", bound=Rollout)
W = TypeVar("W")


@dataclass(slots=True)
class Batch(Generic[R, W]):
    """The rollouts of an update with their rewards, in the same order.

    scored_indices: indices of those that have a reward.
    attempts: how often rewards were requested from the services.
    dropped_stale: number of rollouts that were left out because they were older than
    `rl.max_staleness` allows.
    """

    rollouts: list[R]
    rewards: list[W]
    scored_indices: list[int]
    attempts: int = 1
    dropped_stale: int = 0

    def select_scored(self) -> tuple[list[R], list[W]]:
        """Return the rollouts that are trained on, and their rewards."""
        return [self.rollouts[i] for i in self.scored_indices], [
            self.rewards[i] for i in self.scored_indices
        ]


class BatchCollector(Protocol):
    """The part of a task that samples its batches.

    stop_reason: the reason why the last batch has no rewards, or an evaluation failed, in one line;
    None: it has, or the run is to end.
    """

    stop_reason: str | None

    def collect(self, sampler: Sampler, update: int, clock: PhaseTimer) -> Batch[Any, Any] | None:
        """Return the full batch of an update, the same on every process.

        None: it has no rewards, and the update has not started.
        """


def batch_indices(examples: int, batch_size: int, update: int, seed: int) -> list[int]:
    """Return the prompts of update `update` (from 1): shuffled passes over the data.

    They depend only on the arguments, so that a run can be resumed at any update.
    """
    import torch

    indices: list[int] = []
    for position in range((update - 1) * batch_size, update * batch_size):
        epoch, offset = divmod(position, examples)
        if offset == 0 or not indices:
            generator = torch.Generator().manual_seed(stream_seed("order", seed, epoch))
            order = torch.randperm(examples, generator=generator).tolist()
        indices.append(order[offset])
    return indices


def oldest_version(rollout: Rollout) -> int | None:
    """Return the oldest weights that sampled a token; None if the sampler does not know."""
    if rollout.weight_versions is None:
        return None
    return min(
        (
            version
            for version, is_action in zip(rollout.weight_versions, rollout.actions, strict=True)
            if is_action
        ),
        default=None,
    )


def is_stale(rollout: Rollout, update: int, max_staleness: int) -> bool:
    """Return whether a token is older than update `update` may learn from.

    The age of a token is the number of updates between the weights that sampled it and those that
    learn from it, which have version `update` - 1.
    """
    version = oldest_version(rollout)
    return version is not None and update - 1 - version > max_staleness


def drop_stale(batch: Batch[Any, Any], update: int, max_staleness: int) -> None:
    """Leave out, and count, the groups with a rollout that is older than the bound."""
    stale_groups = {
        rollout.group for rollout in batch.rollouts if is_stale(rollout, update, max_staleness)
    }
    dropped: Sequence[int] = [
        index for index in batch.scored_indices if batch.rollouts[index].group in stale_groups
    ]
    batch.dropped_stale += len(dropped)
    batch.scored_indices = [index for index in batch.scored_indices if index not in set(dropped)]
