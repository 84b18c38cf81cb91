"""The controls: rewards that belong to other episodes, and weights that were never trained.

The trainer has no switch for them, so they are built around it. Its collector returns a batch in
which every episode has its own reward. Here the rewards are exchanged before advantages are
computed from them. The log still has the stats of the true rewards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from evidence.search.arms import Dealt
from scorekit.files import replacing_folder
from trainer.rl.sampler import Sampler
from trainer.runs.run_log import PhaseTimer
from trainer.search.training import train
from trainer.search.training.collector import EpisodeCollector, SearchBatch


def by_chance(lengths: Sequence[int], seed: str) -> list[int]:
    """Return for each row the row whose reward it gets: all rows of the update in random order."""
    rows = list(range(len(lengths)))
    random.Random(seed).shuffle(rows)
    return rows


def by_row(lengths: Sequence[int], seed: str) -> list[int]:
    """Return the episode whose reward each episode gets, if rewards are dealt by row.

    A batch sorted by length would get them so if they were written in question order.
    """
    ordered = sorted(range(len(lengths)), key=lambda row: lengths[row])
    paid = [0] * len(lengths)
    for row, episode in enumerate(ordered):
        paid[episode] = row
    return paid


RULES = {"chance": by_chance, "row": by_row}


def deal(batch: SearchBatch, dealt: Dealt, seed: str) -> None:
    """Give the episodes that are learned from one another's rewards."""
    rows = RULES[dealt]([batch.rollouts[index].length for index in batch.scored_indices], seed)
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


def random_policy(like: Path, folder: Path, seed: int) -> None:
    """Write a policy of the same architecture with new random weights and the same tokenizer."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
    )

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like))
    model.generation_config = GenerationConfig.from_pretrained(like)
    with replacing_folder(folder) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(like).save_pretrained(partial)
