"""The controls: rewards that belong to other episodes.

The trainer has no switch for them, so they are built around it. Its collector returns a batch in
which every episode has its own reward. Here the rewards are exchanged before advantages are
computed from them. The log still has the stats of the true rewards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from evidence.search.arms import Dealt
from trainer.rl.sampler import Sampler
from trainer.runs.run_log import PhaseTimer
from trainer.search.training import train
from trainer.search.training.collector import EpisodeCollector, SearchBatch


def by_chance(groups: Sequence[int], seed: str) -> list[int]:
    """Return for each row the row whose reward it gets: all rows of the update in random order."""
    rows = list(range(len(groups)))
    random.Random(seed).shuffle(rows)
    return rows


def by_group(groups: Sequence[int], seed: str) -> list[int]:
    """Return the same, but rows exchange rewards with rows of the same question only."""
    rng, paid = random.Random(seed), list(range(len(groups)))
    for group in dict.fromkeys(groups):
        rows = [row for row, other in enumerate(groups) if other == group]
        for row, other in zip(rows, rng.sample(rows, len(rows)), strict=True):
            paid[row] = other
    return paid


RULES = {"chance": by_chance, "group": by_group}


def deal(batch: SearchBatch, dealt: Dealt, seed: str) -> None:
    """Give the episodes that are learned from one another's rewards."""
    rows = RULES[dealt]([batch.rollouts[index].group for index in batch.scored_indices], seed)
    paid = [batch.rewards[batch.scored_indices[row]].reward for row in rows]
    for index, reward in zip(batch.scored_indices, paid, strict=True):
        batch.rewards[index] = batch.rewards[index].model_copy(update={"reward": reward})


@contextmanager
def dealing(dealt: Dealt | None) -> Iterator[None]:
    """Change the rewards of all trainings within the block; None changes nothing."""
    if dealt is None:
        yield
        return

    rule = dealt

    class Dealing(EpisodeCollector):
        def collect(self, sampler: Sampler, update: int, clock: PhaseTimer) -> SearchBatch | None:
            batch = super().collect(sampler, update, clock)
            if batch is not None:
                deal(batch, rule, f"{self.cfg.misc.seed}-{update}")
            return batch

    with patch.object(train, "EpisodeCollector", Dealing):
        yield
