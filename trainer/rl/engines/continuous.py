"""Continuous batches: a row starts when another one ends, in this process.

Each step admits waiting prompts and adds one token to all rows. Positions of rows are explicit, so
that a row's place in the batch does not matter.
Shapes: R rows, P tokens of the longest prompt, C columns of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from trainer.rl.engines.prompt_queue import PromptQueue, QueuedPrompt
from trainer.rl.engines.row_cache import RowCache, cache_parameter
from trainer.rl.engines.token_chooser import TokenChooser, TokenStream
from trainer.rl.forward import image_inputs, micro_batches
from trainer.rl.sampler import SampledCompletion, SeededPrompt

#: Padded tokens of the prompts that are read in one pass.
PREFILL_TOKENS = 2**14


@dataclass(eq=False, slots=True)
class CompletionRow:
    """Holds a prompt that runs, and its completion so far.

    position_offset: what images of the prompt add to the positions of the text after them.
    """

    queued: QueuedPrompt
    stream: TokenStream = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    position_offset: int = 0

    def __post_init__(self) -> None:
        self.stream = TokenStream(self.queued.prompt.seed, self.queued.prompt.temperature)

    @property
    def num_cached(self) -> int:
        """Return the number of ids that the cache holds: all but the last one."""
        return len(self.queued.prompt.ids) + len(self.token_ids) - 1

    @property
    def is_running(self) -> bool:
        """Return whether the row is neither finished nor cancelled."""
        return not self.queued.future.done()

    def add(self, token_id: int, logprob: float, version: int, stops: Collection[int]) -> None:
        """Add a token; if it is the last one, the prompt's caller gets the completion."""
        self.token_ids.append(token_id)
        self.versions.append(version)
        self.logprobs.append(logprob)
        is_full = len(self.token_ids) >= self.queued.prompt.max_new_tokens
        if (token_id in stops or is_full) and not self.queued.future.done():
            logprobs = self.logprobs if self.queued.with_logprobs else None
            completion = SampledCompletion(self.token_ids, logprobs, self.versions)
            self.queued.future.set_result(completion)


class ContinuousQueue(PromptQueue):
    """Runs up to `batch_size` prompts as the rows of one batch.

    A finished row stays in the tensors, hidden, until removing it is worth a copy of the cache.
    """

    def __init__(
        self,
        model: Any,
        chooser: TokenChooser,
        batch_size: int,
        *,
        stops: Collection[int],
        pad_id: int,
        weight_version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare to run prompts.

        model: a transformers model without wrappers, whose cache is mergeable.
        stops: ids that end a completion.
        weight_version: returns the version of the model's weights.
        """
        super().__init__()
        self._model = model
        self._chooser = chooser
        self._batch_size = batch_size
        self._stops = frozenset(stops)
        self._pad_id = pad_id
        self._weight_version = weight_version
        self._rows: list[CompletionRow] = []
        self._cache: RowCache | None = None
        self._cache_name = str(cache_parameter(model))
        parameters = signature(type(model).forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        #: The part of a model with 3-D positions that notes how images shift them.
        self._shifting: Any = next((m for m in model.modules() if hasattr(m, "rope_deltas")), None)

    @torch.no_grad()
    def complete_all(
        self, prompts: Sequence[SeededPrompt], with_logprobs: bool
    ) -> Iterator[tuple[int, SampledCompletion]]:
        """Yield (index of a prompt, its completion), each when it is ready, without an event loop.

        Rows are admitted in the order of the prompts.
        """
        futures = [Future[SampledCompletion]() for _ in prompts]
        pairs = zip(prompts, futures, strict=True)
        self.waiting.extend(QueuedPrompt(prompt, with_logprobs, f) for prompt, f in pairs)
        unfinished = set(range(len(prompts)))
        while unfinished:
            self.step()
            ready = sorted(index for index in unfinished if futures[index].done())
            unfinished.difference_update(ready)
            for index in ready:
                yield index, futures[index].result()
        self.clear()

    def running(self) -> list[QueuedPrompt]:
        """Return the prompts of rows that are not finished."""
        return [row.queued for row in self._rows if row.is_running]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self._cache = [], None

    def step(self) -> None:
        """Admit waiting prompts, then add a token to each row."""
        self._admit()
        self._remove_finished()
        if self._rows:
            self._decode()

    def _admit(self) -> None:
        """Read waiting prompts, as many as there are free rows.

        Where more wait than there is room for, they wait for an eighth of the rows: each admission
        copies the cache.
        """
        num_free = self._batch_size - len(self.running())
        if not self.waiting or (num_free < len(self.waiting) and num_free * 8 < self._batch_size):
            return
        count = min(num_free, len(self.waiting))
        self._remove_finished(at_once=True)
        rows = [CompletionRow(self.waiting.popleft()) for _ in range(count)]
        merged = self._rows
        self._rows = merged + rows  # so that an error reaches all of them
        groups = _by_prompt(rows)
        lengths = [len(group[0].queued.prompt.ids) for group in groups]
        for indices in micro_batches(lengths, PREFILL_TOKENS):
            batch = [row for i in indices for row in groups[i]]
            cache = self._prefill([groups[i] for i in indices])
            running = [i for i, row in enumerate(batch) if row.is_running]
            if not running:
                continue
            if len(running) < len(batch):
                cache.keep_rows(running)
            merged = merged + [batch[i] for i in running]
            if self._cache is None:
                self._cache = cache
            else:
                self._cache.append(cache)
        self._rows = merged

    def _prefill(self, groups: Sequence[Sequence[CompletionRow]]) -> RowCache:
        """Read a prompt for each group of rows, and add the first token to each row."""
        prompts = [group[0].queued.prompt for group in groups]
        ids, attended = left_padded([prompt.ids for prompt in prompts], self._pad_id)
        images = image_inputs(self._model, ids, attended, [prompt.images for prompt in prompts])
        device = self._model.device
        inputs: dict[str, Any] = {"attention_mask": attended.long().to(device), **images}
        is_shifted = bool(images) and self._shifting is not None
        if is_shifted:  # the model computes the positions itself
            self._shifting.rope_deltas = None
        else:
            positions = (attended.long().cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions.to(device)
        cache = RowCache(self._model.config)
        logits = self._forward(ids.to(device), cache, inputs)
        if is_shifted:
            offsets = self._shifting.rope_deltas.flatten().tolist()
            for group, offset in zip(groups, offsets, strict=True):
                for row in group:
                    row.position_offset = int(offset)
        rows = [row for group in groups for row in group]
        if len(rows) > len(groups):
            copies = [i for i, group in enumerate(groups) for _ in group]
            cache.keep_rows(copies)
            logits = logits[copies]
        self._add_tokens(rows, logits)
        return cache

    def _decode(self) -> None:
        """Add a token to each row; finished rows attend to nothing but their last token."""
        assert self._cache is not None
        device = self._model.device
        lengths = torch.tensor([row.num_cached if row.is_running else 0 for row in self._rows])
        self._cache.keep_columns(int(lengths.max()))
        width = self._cache.num_columns + 1
        attended = torch.arange(width) >= width - 1 - lengths[:, None]  # [R, C + 1]
        positions = lengths[:, None]
        if self._shifting is not None:
            offsets = torch.tensor([row.position_offset for row in self._rows])
            positions = (lengths + offsets)[None, :, None].expand(3, -1, -1)
        ids = torch.tensor([row.token_ids[-1:] for row in self._rows])
        inputs = {"attention_mask": attended.long().to(device)}
        inputs["position_ids"] = positions.to(device)
        self._add_tokens(self._rows, self._forward(ids.to(device), self._cache, inputs))

    def _forward(self, ids: Tensor, cache: RowCache, inputs: dict[str, Any]) -> Tensor:
        """Return the logits [R, V] of the next token; the cache then holds `ids`."""
        inputs = {**inputs, self._cache_name: cache.cache, "use_cache": True, **self._options}
        logits: Tensor = self._model(input_ids=ids, **inputs).logits
        return logits[:, -1]

    def _add_tokens(self, rows: Sequence[CompletionRow], logits: Tensor) -> None:
        """Choose a token for each row that runs."""
        uniforms = [row.stream.next_uniform() if row.is_running else 0.0 for row in rows]
        temperatures = [row.stream.temperature for row in rows]
        ids, logprobs = self._chooser.choose(logits, uniforms, temperatures)
        version = self._weight_version()
        for row, token_id, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            if row.is_running:
                row.add(token_id, logprob, version, self._stops)

    def _remove_finished(self, *, at_once: bool = False) -> None:
        """Remove finished rows from the tensors.

        at_once: even if they are few.
        """
        running = [i for i, row in enumerate(self._rows) if row.is_running]
        num_finished = len(self._rows) - len(running)
        if not running:
            self.clear()
        elif (
            self._cache is not None
            and num_finished
            and (at_once or num_finished * 8 >= len(self._rows))
        ):
            self._cache.keep_rows(running)
            self._rows = [self._rows[i] for i in running]


def _by_prompt(rows: Sequence[CompletionRow]) -> list[list[CompletionRow]]:
    """Return the rows, grouped by equal ids and the same images: each prompt is read once."""
    groups: dict[tuple[Any, ...], list[CompletionRow]] = {}
    for row in rows:
        prompt = row.queued.prompt
        key = (tuple(prompt.ids), tuple(map(id, prompt.images)))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the ids [R, P] of prompts that end together, and False [R, P] on their padding."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    attended = torch.zeros(ids.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attended[row, width - len(prompt) :] = True
    return ids, attended
