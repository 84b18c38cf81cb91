"""Sampling in this process: continuous batches, or fixed ones by transformers' `generate()`.

Shapes: B sequences, P tokens of the longest prompt, T of the longest completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.continuous import (
    BatchQueue,
    ContinuousQueue,
    PromptQueue,
    RowCache,
    TokenChooser,
    TokenStream,
    cache_parameter,
    has_mergeable_cache,
    left_padded,
)
from trainer.rl.engines.turn_cache import TurnCache
from trainer.rl.forward import Image, image_inputs
from trainer.rl.policy import pad_token_id, stop_token_ids, unwrap_distributed, unwrap_peft
from trainer.rl.sampler import SampledCompletion, SeededPrompt


class GenerateSampler:
    """Samples from the model that is trained, so that there are no weights to sync."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        world: DistributedContext | None = None,
        *,
        banned_token_ids: Sequence[int] = (),
    ) -> None:
        """Prepare to sample from the model in this process.

        world: if its processes share the weights, all of them make the same number of steps.
        banned_token_ids: ids that must not be sampled.
        """
        self.model = model
        self.world = world if world is not None and world.is_sharded else None
        self.stops = stop_token_ids(unwrap_distributed(model), tokenizer)
        self.pad_id = pad_token_id(unwrap_distributed(model), tokenizer)
        self.banned_token_ids = list(banned_token_ids)
        self.weight_version = 0
        self._queues: dict[tuple[float, int, int], PromptQueue] = {}
        self._turn_cache = TurnCache()

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        gen_cfg: SamplingConfig,
        *,
        images: Sequence[Sequence[Image]] | None = None,
        seed: int | None = None,
        with_logprobs: bool = True,
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Yield completions as `Sampler.sample` says.

        They run as `complete` says, or in the fixed batches of `complete_batch` where the model's
        cache cannot be merged, or processes share its weights. Short prompts are first.
        """
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        num_samples = gen_cfg.num_samples_per_prompt
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        copies = [
            SeededPrompt(
                prompts[i],
                images[i] if images else (),
                gen_cfg.temperature,
                gen_cfg.max_new_tokens,
                stream_seed("prompt", seed, i) + copy,
            )
            for i in order
            for copy in range(num_samples)
        ]
        samples_by_prompt: dict[int, dict[int, SampledCompletion]] = {}
        for index, completion in self._complete_all(copies, gen_cfg, with_logprobs):
            i, copy = order[index // num_samples], index % num_samples
            samples = samples_by_prompt.setdefault(i, {})
            samples[copy] = completion
            if len(samples) == num_samples:
                yield i, [samples[copy] for copy in range(num_samples)]
                del samples_by_prompt[i]

    def _complete_all(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, with_logprobs: bool
    ) -> Iterator[tuple[int, SampledCompletion]]:
        """Yield (index of a prompt, its completion), each when it is ready."""
        model = unwrap_peft(self.model)
        if self.world is not None or not has_mergeable_cache(model):
            return self._in_fixed_batches(prompts, gen_cfg, with_logprobs)
        _check_temperatures([prompt.temperature for prompt in prompts], with_logprobs)
        return self._continuous_queue(model, gen_cfg).complete_all(prompts, with_logprobs)

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion, as `Sampler.complete` says.

        Prompts run in one continuous batch, or in fixed ones as they wait if the model's cache
        cannot be merged. They have the autocast state of the code that runs the event loop.
        """
        if self.world is not None:
            raise RuntimeError("complete: processes that share weights need complete_turns")
        _check_temperatures([prompt.temperature], with_logprobs)
        settings = (gen_cfg.top_p, gen_cfg.top_k, gen_cfg.batch_size)
        if settings not in self._queues:
            self._queues[settings] = self._open_queue(gen_cfg)
        return await self._queues[settings].complete(prompt, with_logprobs)

    def _open_queue(self, gen_cfg: SamplingConfig) -> PromptQueue:
        """Return the queue of prompts with these settings."""
        model = unwrap_peft(self.model)
        if has_mergeable_cache(model):
            return self._continuous_queue(model, gen_cfg)
        return BatchQueue(
            lambda prompts, with_logprobs: self.complete_batch(
                prompts, gen_cfg, with_logprobs=with_logprobs
            ),
            gen_cfg.batch_size,
        )

    def _continuous_queue(self, model: nn.Module, gen_cfg: SamplingConfig) -> ContinuousQueue:
        return ContinuousQueue(
            model,
            TokenChooser(gen_cfg.top_p, gen_cfg.top_k, self.banned_token_ids),
            gen_cfg.batch_size,
            stops=self.stops,
            pad_id=self.pad_id,
            weight_version=lambda: self.weight_version,
            turn_cache=self._turn_cache,
        )

    @torch.no_grad()
    def complete_turns(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Return the completion of each prompt, one turn of a conversation each.

        They run as `sample` says. The same turns of the same conversations in the same order give
        the same bits.
        gen_cfg: as of `Sampler.complete`.
        """
        completions = dict(self._complete_all(prompts, gen_cfg, with_logprobs))
        return [completions[i] for i in range(len(prompts))]

    def complete_batch(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Return the completion of each prompt, sampled in fixed batches.

        The same prompts in the same order give the same bits. Batches are by length, short prompts
        first. A process with fewer batches than another samples ones that are not used.
        gen_cfg: as of `Sampler.complete`.
        """
        completions = dict(self._in_fixed_batches(prompts, gen_cfg, with_logprobs))
        return [completions[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _in_fixed_batches(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, with_logprobs: bool
    ) -> Iterator[tuple[int, SampledCompletion]]:
        """Yield (index of a prompt, its completion), batch by batch."""
        _check_temperatures([prompt.temperature for prompt in prompts], with_logprobs)
        chooser = TokenChooser(gen_cfg.top_p, gen_cfg.top_k, self.banned_token_ids)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        batches = [
            order[first : first + gen_cfg.batch_size]
            for first in range(0, len(order), gen_cfg.batch_size)
        ]
        # Before the first pass: a process without batches would meet the others within theirs
        num_passes = len(batches) if self.world is None else self.world.max_passes(len(batches))
        for batch in batches:
            sampled = self._complete_rows([prompts[i] for i in batch], chooser, with_logprobs)
            yield from zip(batch, sampled, strict=True)
        for _ in range(num_passes - len(batches)):
            self._complete_rows([SeededPrompt(self.stops[:1], (), 0.0, 1, 0)], chooser, False)

    def _complete_rows(
        self, prompts: Sequence[SeededPrompt], chooser: TokenChooser, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Sample one batch of prompts by the model's `generate`."""
        from transformers import GenerationConfig as HFGenerationConfig
        from transformers import LogitsProcessorList

        processor = SeededChoice(prompts, chooser, self.stops[0])
        config = HFGenerationConfig(
            do_sample=False,
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            eos_token_id=self.stops,
            pad_token_id=self.pad_id,
            use_cache=True,
        )
        model = unwrap_peft(self.model)  # peft's generate leaves our settings in it
        device = next(model.parameters()).device
        ids, attended = left_padded([prompt.ids for prompt in prompts], self.pad_id)
        inputs = {"attention_mask": attended.long().to(device)}
        inputs |= image_inputs(model, ids, attended, [prompt.images for prompt in prompts])
        if has_mergeable_cache(model):
            inputs[str(cache_parameter(model))] = RowCache(model.config).cache
        with _with_generation_config(model, config):
            model.generate(
                input_ids=ids.to(device),
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([processor]),
                synced_gpus=self.world is not None,
            )
        return [
            self._with_versions(completion)
            for completion in processor.completions(self.stops, with_logprobs)
        ]

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Note the version of the weights: the model is the one that is trained.

        What older weights have read of running conversations is forgotten.
        """
        self.weight_version = update
        self._turn_cache.clear()

    def forget(self, affinity: str) -> None:
        """Free what is kept for the next turn of a conversation: it has ended."""
        self._turn_cache.forget(affinity)

    def stats(self) -> dict[str, float | int | None]:
        """Return no stats."""
        return {}

    def _with_versions(self, completion: SampledCompletion) -> SampledCompletion:
        versions = [self.weight_version] * len(completion.token_ids)
        return replace(completion, versions=versions)

    def close(self) -> None:
        """Do nothing."""


class SeededChoice:
    """A logits processor that leaves one possible id in each row: that of its random stream.

    A row's last token is replaced by a stop id, so that the batch ends with its last row.
    """

    def __init__(
        self, prompts: Sequence[SeededPrompt], chooser: TokenChooser, stop_id: int
    ) -> None:
        self._prompts = prompts
        self._streams = [TokenStream(prompt.seed, prompt.temperature) for prompt in prompts]
        self._chooser = chooser
        self._stop_id = stop_id
        self._ids: list[list[int]] = []  # of each step
        self._logprobs: list[list[float]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] that are 0 for the chosen id, and minus infinity for all others."""
        uniforms = [stream.next_uniform() for stream in self._streams]
        temperatures = [stream.temperature for stream in self._streams]
        ids, logprobs = self._chooser.choose(scores, uniforms, temperatures)
        self._ids.append(ids.tolist())
        self._logprobs.append(logprobs.tolist())
        num_tokens = len(self._ids)
        is_full = [num_tokens >= prompt.max_new_tokens for prompt in self._prompts]
        ids = ids.masked_fill(torch.tensor(is_full, device=ids.device), self._stop_id)
        return torch.full_like(scores, -torch.inf).scatter(-1, ids[:, None], 0.0)

    def completions(self, stops: Sequence[int], with_logprobs: bool) -> list[SampledCompletion]:
        """Return the completion of each prompt."""
        completions = []
        for row, prompt in enumerate(self._prompts):
            ids = [step[row] for step in self._ids[: prompt.max_new_tokens]]
            ids = _until_stop(ids, stops)
            logprobs = [step[row] for step in self._logprobs[: len(ids)]]
            completions.append(SampledCompletion(ids, logprobs if with_logprobs else None))
        return completions


@contextmanager
def _with_generation_config(model: nn.Module, config: Any) -> Iterator[None]:
    """Replace the model's generation config with `config`, within.

    `generate` fills every field that has its default value from the model's own generation config:
    a temperature of 1 would become the folder's 0.6.
    """
    model_config = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = model_config


def _until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    """Return the ids up to and with the first stop id; padding after it is dropped."""
    for index, token_id in enumerate(ids):
        if token_id in stops:
            return ids[: index + 1]
    return ids


def _check_temperatures(temperatures: Sequence[float], with_logprobs: bool) -> None:
    """Raise ValueError if log-probabilities of greedy ids are requested."""
    if with_logprobs and 0 in temperatures:
        raise ValueError("greedy ids have no log-probabilities: with_logprobs must be off")
