"""Samples the turns of episodes without reading them again: for runs on few cores.

The trainer's sampler reads the whole conversation before each turn, which is two thirds of the
time of an episode of the small searcher. Here the keys and values of an episode are kept until its
next turn, and a row that has ended its turn is left out of the steps of the others. The completions
are those of the trainer's sampler, but for the rounding of sums.

Shapes: R rows, N new ids, C columns of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trainer.rl.config import SamplingConfig
from trainer.rl.engines import choice
from trainer.rl.engines.continuous import (
    RowCache,
    TokenChooser,
    TokenStream,
    cache_parameter,
    left_padded,
)
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import unwrap_peft
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.search.rollout import sampled


@dataclass(slots=True)
class Batch:
    """Episodes that are sampled together, and what the model has read of them.

    names: of the episodes, one a row.
    read: the ids of each row that the cache holds.
    attended_RC: which columns are of the row's ids.
    """

    names: list[str]
    read: list[list[int]]
    cache: RowCache
    attended_RC: Tensor

    def keep_rows(self, rows: list[int]) -> None:
        """Leave out all rows but these."""
        if rows == list(range(len(self.names))):
            return
        self.cache.keep_rows(rows)
        self.attended_RC = self.attended_RC[rows]
        self.names, self.read = [self.names[r] for r in rows], [self.read[r] for r in rows]

    def close_gaps(self) -> None:
        """Move each row's columns to the right, and drop what no row needs."""
        width = int(self.attended_RC.sum(-1).max())
        # A stable sort by "is attended" moves gaps to the left, and keeps the order of the rest
        columns_RC = self.attended_RC.int().argsort(dim=-1, stable=True)[:, -width:]
        self.attended_RC = self.attended_RC.gather(-1, columns_RC)
        for layer in self.cache.cache.layers:
            _, heads, _, size = layer.keys.shape
            index = columns_RC[:, None, :, None].expand(-1, heads, -1, size)
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


@dataclass(slots=True)
class Turn:
    """A turn that is being sampled."""

    prompt: SeededPrompt
    stream: TokenStream = field(init=False)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self.stream = TokenStream(self.prompt.seed, self.prompt.temperature)


class TurnSampler(GenerateSampler):
    """A sampler that keeps what the model has read of each episode, by the prompt's `affinity`.

    It needs the trainer's fixed batches (`rollout.deterministic`), and a text model whose layers
    attend to all columns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches: list[Batch] = []

    def sync_weights(self, model: Any, update: int) -> None:
        """Note the version of the weights, and forget what older ones have read."""
        super().sync_weights(model, update)
        self._batches = []

    @torch.no_grad()
    def complete_batch(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Return the completion of each prompt, in order."""
        chooser = TokenChooser(gen_cfg.top_p, gen_cfg.top_k, self.banned_token_ids)
        turns = {prompt.affinity: Turn(prompt) for prompt in prompts}
        assert len(turns) == len(prompts), "two prompts of one episode"
        for batch in self._take(turns):
            self._sample(batch, [turns[name] for name in batch.names], chooser)
        new = [name for name in turns if not turns[name].ids]
        for first in range(0, len(new), gen_cfg.batch_size):
            self._begin([turns[name] for name in new[first : first + gen_cfg.batch_size]], chooser)
        return [
            self._with_versions(
                SampledCompletion(turn.ids, turn.logprobs if with_logprobs else None)
            )
            for turn in turns.values()
        ]

    def _take(self, turns: dict[str, Turn]) -> list[Batch]:
        """Return the batches of these turns, without episodes that have ended or begun anew."""
        running_batches = []
        for batch in self._batches:
            rows = [
                row
                for row, (name, read) in enumerate(zip(batch.names, batch.read, strict=True))
                if name in turns and list(turns[name].prompt.ids[: len(read)]) == read
            ]
            if rows:
                batch.keep_rows(rows)
                running_batches.append(batch)
        self._batches = running_batches
        return list(self._batches)

    def _begin(self, turns: Sequence[Turn], chooser: TokenChooser) -> None:
        """Read the prompts of new episodes, equal ones once, and sample their first turns."""
        keys = [tuple(turn.prompt.ids) for turn in turns]
        distinct = list(dict.fromkeys(keys))
        batch = Batch(
            ["" for _ in distinct],
            [[] for _ in distinct],
            RowCache(self.model.config),
            torch.zeros(len(distinct), 0, dtype=torch.bool),
        )
        logits = self._read(batch, [list(ids) for ids in distinct])
        rows = [distinct.index(key) for key in keys]
        batch.cache.keep_rows(rows)
        batch.attended_RC = batch.attended_RC[rows]
        batch.names = [turn.prompt.affinity for turn in turns]
        batch.read = [list(key) for key in keys]
        self._batches.append(batch)
        self._decode(batch, list(turns), logits[rows], chooser)

    def _sample(self, batch: Batch, turns: list[Turn], chooser: TokenChooser) -> None:
        """Read what is new of running episodes, and sample their next turns."""
        new = [
            list(turn.prompt.ids[len(read) :]) for turn, read in zip(turns, batch.read, strict=True)
        ]
        logits = self._read(batch, new)
        batch.read = [list(turn.prompt.ids) for turn in turns]
        self._decode(batch, turns, logits, chooser)

    def _read(self, batch: Batch, new: Sequence[list[int]]) -> Tensor:
        """Add ids to the cache, and return the logits [R, V] of the next one."""
        ids_RN, added_RN = left_padded(new, self.pad_id)
        batch.attended_RC = torch.cat([batch.attended_RC, added_RN], -1)
        return self._forward(batch.cache, ids_RN, batch.attended_RC)

    def _forward(self, cache: RowCache, ids_RN: Tensor, attended_RC: Tensor) -> Tensor:
        model = unwrap_peft(self.model)
        positions_RC = (attended_RC.long().cumsum(-1) - 1).clamp(min=0)
        inputs = {
            "attention_mask": attended_RC.long(),
            "position_ids": positions_RC[:, -ids_RN.shape[1] :],
            str(cache_parameter(model)): cache.cache,
        }
        logits: Tensor = model(ids_RN, use_cache=True, logits_to_keep=1, **inputs).logits
        return logits[:, -1]

    def _decode(
        self, batch: Batch, turns: list[Turn], logits_RV: Tensor, chooser: TokenChooser
    ) -> None:
        """Sample until all turns are done, and add all their ids but the last to the batch.

        When many rows are done, the others go on in a copy of the cache without them.
        """
        before, longest = batch.cache.num_columns, max(t.prompt.max_new_tokens for t in turns)
        new_columns = [_columns(layer, longest) for layer in batch.cache.cache.layers]
        rows, cache, attended = list(range(len(turns))), batch.cache, batch.attended_RC
        self._choose(turns, logits_RV, chooser)
        while running := [index for index, row in enumerate(rows) if not turns[row].is_done]:
            if len(running) < 0.7 * len(rows):
                _note(new_columns, rows, cache, before)
                cache = _without(cache, running, self.model.config)
                rows, attended = [rows[index] for index in running], attended[running]
            left = [turns[row] for row in rows]
            is_running = torch.tensor([not turn.is_done for turn in left])
            last = torch.tensor([self.pad_id if turn.is_done else turn.ids[-1] for turn in left])
            attended = torch.cat([attended, is_running[:, None]], -1)
            self._choose(left, self._forward(cache, last[:, None], attended), chooser)
        _note(new_columns, rows, cache, before)
        lengths = torch.tensor([len(turn.ids) - 1 for turn in turns])
        width = int(lengths.max())
        for layer, (keys, values) in zip(batch.cache.cache.layers, new_columns, strict=True):
            layer.keys = torch.cat([layer.keys[:, :, :before], keys[:, :, :width]], 2)
            layer.values = torch.cat([layer.values[:, :, :before], values[:, :, :width]], 2)
        is_own = torch.arange(width) < lengths[:, None]
        batch.attended_RC = torch.cat([batch.attended_RC, is_own], -1)
        batch.read = [[*read, *turn.ids[:-1]] for read, turn in zip(batch.read, turns, strict=True)]
        batch.close_gaps()

    def _choose(self, turns: Sequence[Turn], logits_RV: Tensor, chooser: TokenChooser) -> None:
        """Add an id to each turn that is not done."""
        uniforms = [0.0 if turn.is_done else turn.stream.next_uniform() for turn in turns]
        temperatures = [turn.stream.temperature for turn in turns]
        ids, logprobs = chooser.choose(logits_RV, uniforms, temperatures)
        for turn, id, logprob in zip(turns, ids.tolist(), logprobs.tolist(), strict=True):
            if not turn.is_done:
                turn.ids.append(id)
                turn.logprobs.append(logprob)
                turn.is_done = id in self.stops or len(turn.ids) >= turn.prompt.max_new_tokens


def _columns(layer: Any, width: int) -> tuple[Tensor, Tensor]:
    """Return empty keys and values for so many new columns of each row."""
    rows, heads, _, size = layer.keys.shape
    return layer.keys.new_zeros(rows, heads, width, size), layer.values.new_zeros(
        rows, heads, width, size
    )


def _note(
    new_columns: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int], cache: RowCache, before: int
) -> None:
    """Copy the columns behind `before` of a cache of these rows."""
    width = cache.num_columns - before
    for layer, (keys, values) in zip(cache.cache.layers, new_columns, strict=True):
        keys[rows, :, :width] = layer.keys[:, :, before:]
        values[rows, :, :width] = layer.values[:, :, before:]


def _without(cache: RowCache, rows: Sequence[int], config: Any) -> RowCache:
    """Return a copy of some rows of a cache."""
    smaller, indices = RowCache(config), torch.tensor(rows)
    for layer, full in zip(smaller.cache.layers, cache.cache.layers, strict=True):
        layer.lazy_initialization(full.keys, full.values)
        layer.keys = full.keys.index_select(0, indices)
        layer.values = full.values.index_select(0, indices)
    return smaller


@contextmanager
def keeping_turns() -> Iterator[None]:
    """Let all trainings and measurements within the block sample so; they must be deterministic."""
    with ExitStack() as stack:
        for module in (choice, sampled):
            stack.enter_context(patch.object(module, "GenerateSampler", TurnSampler))
        yield
