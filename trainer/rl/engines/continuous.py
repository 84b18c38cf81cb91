"""Continuous batches: a row starts when another one ends, in this process.

From top to bottom: ids are chosen from logits; rows of different age share a cache; prompts wait in
a queue; and a queue runs them as the rows of one batch. Each step admits waiting prompts and adds
one token to all rows.

An id depends on its row's logits and on one uniform number, not on the rows beside it. Positions of
rows are explicit, so that a row's place in the batch does not matter. Rows end at the same column
of the cache: a shorter row has unused columns on its left, which the attention mask hides.
Attention depends on the distance between columns only, so that columns can be added and removed on
the left.
Shapes: B or R rows, P tokens of the longest prompt, C columns of the cache, V vocabulary.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from trainer.rl.engines.turn_cache import ReadTurns, TurnCache
from trainer.rl.forward import image_inputs, micro_batches
from trainer.rl.sampler import SampledCompletion, SeededPrompt

#: Padded tokens of the prompts that are read in one pass.
PREFILL_TOKENS = 2**14
#: Tokens that running rows get at most while prompts wait to be read together.
MAX_HELD = 8

#: Keys or values [rows, heads, columns, size] of several batches, and the rows to take (None: all).
RowGroups = Sequence[tuple[Tensor, Sequence[int] | None]]


class TokenStream:
    """Holds the random numbers of one completion: a uniform number for each sampled token."""

    def __init__(self, seed: int, temperature: float) -> None:
        # torch's generator would use the low 32 bits of a seed only
        self._generator = random.Random(seed)
        self.temperature = temperature

    def next_uniform(self) -> float:
        """Return the next number of the stream, in [0, 1); greedy rows use none."""
        if self.temperature == 0:
            return 0.0
        return self._generator.random()


class TokenChooser:
    """Applies temperatures, top_k and top_p to logits, and chooses an id of each row.

    The id is the first whose cumulative probability exceeds the row's uniform number (inverse
    transform sampling).
    """

    def __init__(self, top_p: float, top_k: int, banned_token_ids: Sequence[int]) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self._banned_ids = torch.tensor(banned_token_ids, dtype=torch.long)
        self._cuts: list[Any] = []
        if top_k > 0:
            self._cuts.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._cuts.append(TopPLogitsWarper(top_p))

    def choose(
        self, logits_BV: Tensor, uniforms: Sequence[float], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen ids [B], and their log-probabilities [B] in the resulting distribution.

        uniforms: a number in [0, 1) for each row.
        temperatures: of each row. 0 chooses the likeliest id, whose log-probability means nothing.
        """
        device = logits_BV.device
        scores = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        if len(self._banned_ids):
            scores = scores.index_fill(-1, self._banned_ids.to(device), -torch.inf)
        if not any(temperatures):
            ids = scores.argmax(-1)
            return ids, torch.zeros_like(ids, dtype=scores.dtype)
        divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=scores.dtype)
        scaled = scores / divisors.to(device)[:, None]
        for cut in self._cuts:
            scaled = cut(None, scaled)
        # One softmax for both: on a CPU `log_softmax` takes ten times as long
        probabilities = scaled.softmax(-1)
        ids = invert_cumulative(probabilities, torch.tensor(uniforms, dtype=torch.float64))
        logprobs = probabilities.gather(-1, ids[:, None])[:, 0].log()
        if not all(temperatures):
            greedy = torch.tensor([t == 0 for t in temperatures], device=device)
            ids = torch.where(greedy, scores.argmax(-1), ids)
        return ids, logprobs


def invert_cumulative(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first id [B] of each row whose cumulative probability exceeds its number.

    The sums are of float64. An id of probability 0 is never returned, whatever their rounding.
    Raises ValueError if the probabilities are not those of a distribution.
    """
    sums = probabilities_BV.cumsum(-1, dtype=torch.float64)
    thresholds = uniforms_B.to(sums.device)[:, None] * sums[:, -1:]
    ids = torch.searchsorted(sums, thresholds, right=True).clamp(max=sums.shape[-1] - 1)
    if not bool((probabilities_BV.gather(-1, ids) > 0).all()):
        # Parallel sums need not increase: an id of probability 0 can seem to raise them
        ids = _first_possible(probabilities_BV, sums > thresholds)
    return ids[:, 0]


def _first_possible(probabilities_BV: Tensor, exceeds_BV: Tensor) -> Tensor:
    """Return, of the ids of positive probability, the first [B, 1] that exceeds, else the last."""
    is_possible = probabilities_BV > 0
    if not bool(is_possible.any(-1).all()):
        raise ValueError("logits: not finite. The model has diverged, or its precision is too low")
    vocabulary = probabilities_BV.shape[-1]
    last = vocabulary - 1 - is_possible.flip(-1).byte().argmax(-1, keepdim=True)
    matches = is_possible & exceeds_BV
    first = matches.byte().argmax(-1, keepdim=True)
    return torch.where(matches.any(-1, keepdim=True), first, last)


class RowCache:
    """Holds the keys and values of a batch of rows, and adds and removes rows.

    cache: what the model reads and extends.
    num_columns: columns that the rows have, of which sliding layers keep the last ones.
    """

    def __init__(self, config: Any) -> None:
        from trainer.rl.engines.block_cache import block_cache

        self.cache: Any = block_cache(config)

    @property
    def num_columns(self) -> int:
        """Return the number of columns, unused ones included."""
        return int(self.cache.get_seq_length())

    def take_rows(
        self, rows: Sequence[int], later_caches: Sequence[tuple[RowCache, list[int]]] = ()
    ) -> None:
        """Hold these rows, and after them those of other caches, which must not be used afterwards.

        Each layer is copied once. Rows with fewer columns begin with zeros.
        """
        row_groups = [(self, rows), *later_caches]
        num_columns = max(cache.num_columns for cache, _ in row_groups)
        for number, layer in enumerate(self.cache.layers):
            layers = [(cache.cache.layers[number], chosen) for cache, chosen in row_groups]
            keys = [(part.keys, chosen) for part, chosen in layers]
            values = [(part.values, chosen) for part, chosen in layers]
            _hold(layer, keys, values, num_columns)
            for part, _ in layers[1:]:
                _drop(part)

    def keep_columns(self, num_columns: int) -> None:
        """Remove columns on the left if there are more than this."""
        if num_columns >= self.num_columns:
            return
        for layer in self.cache.layers:
            width = _width(layer, num_columns)
            layer.keys = layer.keys[:, :, -width:]
            layer.values = layer.values[:, :, -width:]
            if layer.is_sliding:
                layer.cumulative_length = num_columns


def _width(layer: Any, num_columns: int) -> int:
    """Return the number of columns that a layer stores."""
    return min(num_columns, layer.sliding_window - 1) if layer.is_sliding else num_columns


def _hold(layer: Any, keys: RowGroups, values: RowGroups, num_columns: int, spare: int = 1) -> None:
    """Let a layer hold rows of several batches, of which the longest has as many columns.

    spare: columns that will be added soon.
    """
    from trainer.rl.engines.block_cache import capacity_for, stacked

    if layer.is_sliding:
        width = _width(layer, num_columns)
        layer.keys, layer.values = (stacked(groups, width, width) for groups in (keys, values))
        layer.cumulative_length = num_columns
    else:
        capacity = capacity_for(num_columns + spare)
        storage = (stacked(groups, num_columns, capacity) for groups in (keys, values))
        layer.hold(*storage, num_columns)


def _drop(layer: Any) -> None:
    """Free the memory of a layer."""
    layer.keys = layer.values = None
    if not layer.is_sliding:
        layer.drop_storage()


def has_mergeable_cache(model: Any) -> bool:
    """Return whether `RowCache` can hold the model's rows.

    It cannot where a layer's state is unknown (linear attention, shared or static layers), nor
    where positions cannot be given explicitly.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer

    from trainer.rl.engines.block_cache import BlockLayer

    parameters = signature(type(model).forward).parameters
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or []
    if (
        "position_ids" not in parameters
        or cache_parameter(model) is None
        or model.config.is_encoder_decoder
        or not model._supports_default_dynamic_cache()
        or not set(layer_types) <= {"full_attention", "sliding_attention"}
        or getattr(config, "attention_chunk_size", None) is not None
    ):
        return False
    layers = RowCache(model.config).cache.layers
    return all(
        type(layer) is BlockLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1)
        for layer in layers
    )


def cache_parameter(model: Any) -> str | None:
    """Return the name of the parameter of the model's `forward` that is its cache."""
    parameters = signature(type(model).forward).parameters
    names = ("cache", "past_key_values")  # the second before transformers 5.24
    return next((name for name in names if name in parameters), None)


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """Holds a prompt and the future of its completion."""

    prompt: SeededPrompt
    with_logprobs: bool
    future: asyncio.Future[SampledCompletion] | Future[SampledCompletion]


class PromptQueue(ABC):
    """Completes prompts of one event loop, in steps that block it; other tasks run in between.

    The steps run in the loop's own thread, as long as there is a prompt. So they have the autocast
    state of the code that runs the loop, which must not change meanwhile.
    """

    def __init__(self) -> None:
        self.waiting: deque[QueuedPrompt] = deque()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def step(self) -> None:
        """Make some progress, and set the results of finished prompts; without gradients."""

    @abstractmethod
    def running(self) -> list[QueuedPrompt]:
        """Return the prompts that no longer wait and are not finished."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the running prompts."""

    async def complete(self, prompt: SeededPrompt, with_logprobs: bool) -> SampledCompletion:
        """Return the completion of a prompt; an error of any step is raised here."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        future = loop.create_future()
        self.waiting.append(QueuedPrompt(prompt, with_logprobs, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await future

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve another loop from now on: prompts of a closed one are lost."""
        is_busy = self._task is not None and not self._task.done()
        if is_busy and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("complete: the sampler is in use in another event loop")
        self.waiting.clear()
        self.clear()
        self._loop, self._task = loop, None

    async def _run(self) -> None:
        try:
            while self._has_prompts():
                with torch.no_grad():
                    self.step()
                await asyncio.sleep(0)
            self.clear()  # the last rows would take memory until the next prompts
        except Exception as error:
            for queued in self._abandon():
                queued.future.set_exception(error)
        except BaseException:
            for queued in self._abandon():
                queued.future.cancel()
            raise

    def _has_prompts(self) -> bool:
        """Remove prompts that nobody waits for any more, and return whether there are any."""
        if any(queued.future.done() for queued in self.waiting):
            self.waiting = deque(q for q in self.waiting if not q.future.done())
        return bool(self.waiting) or any(not q.future.done() for q in self.running())

    def _abandon(self) -> list[QueuedPrompt]:
        """Remove all prompts, and return those that are not finished."""
        prompts = [q for q in (*self.running(), *self.waiting) if not q.future.done()]
        self.waiting.clear()
        self.clear()
        return prompts


class BatchQueue(PromptQueue):
    """Runs the prompts that wait as one fixed batch after another."""

    def __init__(
        self,
        complete_batch: Callable[[Sequence[SeededPrompt], bool], list[SampledCompletion]],
        batch_size: int,
    ) -> None:
        """Prepare to run batches.

        complete_batch: returns the completions of prompts, with log-probabilities or without.
        """
        super().__init__()
        self._complete_batch = complete_batch
        self._batch_size = batch_size
        self._batch: list[QueuedPrompt] = []

    def step(self) -> None:
        """Run one batch from its first token to its last."""
        with_logprobs = self.waiting[0].with_logprobs
        equal = [q for q in self.waiting if q.with_logprobs == with_logprobs]
        self._batch = equal[: self._batch_size]
        self.waiting = deque(q for q in self.waiting if q not in self._batch)
        completions = self._complete_batch([q.prompt for q in self._batch], with_logprobs)
        for queued, completion in zip(self._batch, completions, strict=True):
            queued.future.set_result(completion)
        self.clear()

    def running(self) -> list[QueuedPrompt]:
        """Return the prompts of the batch."""
        return self._batch

    def clear(self) -> None:
        """Forget the batch."""
        self._batch = []


@dataclass(eq=False, slots=True)
class CompletionRow:
    """Holds a prompt that runs, and its completion so far.

    position_offset: what images of the prompt add to the positions of the text after them.
    read: what an earlier turn has read of the prompt.
    """

    queued: QueuedPrompt
    read: ReadTurns | None = None
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
    def num_new(self) -> int:
        """Return the number of the prompt's ids that are still to be read."""
        return len(self.queued.prompt.ids) - (0 if self.read is None else len(self.read.ids))

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
        turn_cache: TurnCache | None = None,
    ) -> None:
        """Prepare to run prompts.

        model: a transformers model without wrappers, whose cache is mergeable.
        stops: ids that end a completion.
        weight_version: returns the version of the model's weights.
        turn_cache: keeps what was read of prompts with an affinity, for their next turns. It is not
        used with a model whose layers keep less than all columns, or whose positions images shift.
        """
        super().__init__()
        self._model = model
        self._chooser = chooser
        self._batch_size = batch_size
        self._stops = frozenset(stops)
        self._pad_id = pad_id
        self._weight_version = weight_version
        self._num_held = 0  # tokens that running rows got while the waiting prompts were held
        self._rows: list[CompletionRow] = []
        self._cache: RowCache | None = None
        self._cache_name = str(cache_parameter(model))
        parameters = signature(type(model).forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        #: The part of a model with 3-D positions that notes how images shift them.
        self._shifting: Any = next((m for m in model.modules() if hasattr(m, "rope_deltas")), None)
        is_partial = any(layer.is_sliding for layer in RowCache(model.config).cache.layers)
        self._turn_cache = None if is_partial or self._shifting is not None else turn_cache

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
        """Read waiting prompts, as many as there are free rows, if it is time."""
        num_free = self._batch_size - len(self.running())
        if not self._is_time_to_admit(num_free):
            return
        self._num_held = 0
        count = min(num_free, len(self.waiting))
        if not self.running():
            self.clear()
        rows = [CompletionRow(self.waiting.popleft()) for _ in range(count)]
        before, cache = self._rows, self._cache
        self._rows = before + rows  # so that an error reaches all of them
        read = list(self._read_prompts(rows))
        row_groups = read if cache is None else [(before, cache), *read]
        self._merge(row_groups)

    def _is_time_to_admit(self, num_free: int) -> bool:
        """Return whether enough prompts wait: each admission copies the cache, and is a pass.

        Where more wait than there is room for, they wait for an eighth of the rows. Prompts that
        arrive in an event loop wait until they are a quarter of the rows that run, or for
        `MAX_HELD` tokens.
        """
        count = len(self.waiting)
        if not count:
            self._num_held = 0  # those that waited may have been cancelled
        if not count or (num_free < count and num_free * 8 < self._batch_size):
            return False
        if self._loop is None or count * 4 >= len(self.running()) or self._num_held >= MAX_HELD:
            return True
        self._num_held += 1
        return False

    def _merge(self, row_groups: Sequence[tuple[list[CompletionRow], RowCache]]) -> None:
        """Hold those rows of these caches that run."""
        with_indices = [
            (rows, cache, [i for i, row in enumerate(rows) if row.is_running])
            for rows, cache in row_groups
        ]
        running = [group for group in with_indices if group[2]]
        self._rows = [rows[i] for rows, _, indices in running for i in indices]
        self._cache = running[0][1] if running else None
        if self._cache is not None and (len(running) > 1 or len(self._rows) < len(running[0][0])):
            later_caches = [(cache, indices) for _, cache, indices in running[1:]]
            self._cache.take_rows(running[0][2], later_caches)

    def _read_prompts(
        self, rows: Sequence[CompletionRow]
    ) -> Iterator[tuple[list[CompletionRow], RowCache]]:
        """Read the prompts of rows, or what is new of them; yield rows with their cache."""
        if self._turn_cache is not None:
            for row in rows:
                row.read = self._turn_cache.take(row.queued.prompt)
        groups = _by_prompt([row for row in rows if row.read is None])
        lengths = [len(group[0].queued.prompt.ids) for group in groups]
        for indices in micro_batches(lengths, PREFILL_TOKENS):
            batch = [row for i in indices for row in groups[i]]
            yield batch, self._prefill([groups[i] for i in indices])
        later_turns = [row for row in rows if row.read is not None]
        for indices in micro_batches([row.num_new for row in later_turns], PREFILL_TOKENS):
            batch = [later_turns[i] for i in indices]
            yield batch, self._prefill_later_turns(batch)

    def _prefill_later_turns(self, rows: Sequence[CompletionRow]) -> RowCache:
        """Read what is new of the prompts, and add the first token to each row.

        A row with less new ids than another reads some old ones again: so its columns have no gap.
        """
        prompts = [row.queued.prompt.ids for row in rows]
        num_new = max(row.num_new for row in rows)
        widths = [max(len(ids) - num_new, 0) for ids in prompts]
        cache = RowCache(self._model.config)
        for number, layer in enumerate(cache.cache.layers):
            columns = [row.read.layers[number] for row in rows if row.read is not None]
            keys, values = (
                [
                    (pair[i][None, :, :width], None)
                    for pair, width in zip(columns, widths, strict=True)
                ]
                for i in (0, 1)
            )
            _hold(layer, keys, values, max(widths), spare=num_new)
        for row in rows:
            row.read = None
        device = self._model.device
        ids, _ = left_padded([ids[-num_new:] for ids in prompts], self._pad_id)
        width = cache.num_columns + num_new
        lengths = torch.tensor([len(ids) for ids in prompts])
        attended = torch.arange(width) >= width - lengths[:, None]  # [R, C + new]
        positions = (attended.long().cumsum(-1) - 1).clamp(min=0)[:, -num_new:]
        inputs = {"attention_mask": attended.long().to(device)}
        inputs["position_ids"] = positions.to(device)
        self._add_tokens(rows, self._forward(ids.to(device), cache, inputs), cache)
        return cache

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
            cache.take_rows(copies)
            logits = logits[copies]
        self._add_tokens(rows, logits, cache)
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
        logits = self._forward(ids.to(device), self._cache, inputs)
        self._add_tokens(self._rows, logits, self._cache)

    def _forward(self, ids: Tensor, cache: RowCache, inputs: dict[str, Any]) -> Tensor:
        """Return the logits [R, V] of the next token; the cache then holds `ids`."""
        inputs = {**inputs, self._cache_name: cache.cache, "use_cache": True, **self._options}
        logits: Tensor = self._model(input_ids=ids, **inputs).logits
        return logits[:, -1]

    def _add_tokens(self, rows: Sequence[CompletionRow], logits: Tensor, cache: RowCache) -> None:
        """Choose a token for each row that runs. cache: of these rows."""
        uniforms = [row.stream.next_uniform() if row.is_running else 0.0 for row in rows]
        temperatures = [row.stream.temperature for row in rows]
        ids, logprobs = self._chooser.choose(logits, uniforms, temperatures)
        version = self._weight_version()
        chosen = zip(rows, ids.tolist(), logprobs.tolist(), strict=True)
        for index, (row, token_id, logprob) in enumerate(chosen):
            if row.is_running:
                row.add(token_id, logprob, version, self._stops)
                if not row.is_running:
                    self._keep_turns(row, index, cache)

    def _keep_turns(self, row: CompletionRow, index: int, cache: RowCache) -> None:
        """Keep what was read of a finished row. index: of the row in the cache."""
        prompt = row.queued.prompt
        if self._turn_cache is None or not prompt.affinity or prompt.images:
            return
        layers = [
            (layer.keys[index, :, -row.num_cached :], layer.values[index, :, -row.num_cached :])
            for layer in cache.cache.layers
        ]
        copies = [(keys.clone(), values.clone()) for keys, values in layers]
        self._turn_cache.keep(prompt.affinity, [*prompt.ids, *row.token_ids[:-1]], copies)

    def _remove_finished(self) -> None:
        """Remove finished rows from the tensors, once they are an eighth of all."""
        num_finished = sum(not row.is_running for row in self._rows)
        if num_finished and num_finished * 8 >= len(self._rows) and self._cache is not None:
            self._merge([(self._rows, self._cache)])


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
