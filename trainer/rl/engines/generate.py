"""Sampling in this process: fixed batches by transformers' `generate()`, or continuous ones.

Shapes: B sequences, P tokens of the longest prompt, T of the longest completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.continuous import ContinuousQueue, left_padded
from trainer.rl.engines.prompt_queue import BatchQueue, PromptQueue
from trainer.rl.engines.row_cache import RowCache, cache_parameter, has_mergeable_cache
from trainer.rl.engines.token_chooser import TokenChooser, TokenStream
from trainer.rl.forward import Image, image_inputs
from trainer.rl.policy.tokens import pad_token_id, stop_token_ids
from trainer.rl.policy.wrappers import unwrap_distributed, unwrap_peft
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

        Prompts are batched by length, short ones first. A process with fewer batches than another
        samples completions that are not used.
        """
        if seed is not None:
            torch.manual_seed(seed)
        samples_per_prompt = gen_cfg.num_samples_per_prompt
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        copies = [i for i in order for _ in range(samples_per_prompt)]
        batches = -(-len(copies) // gen_cfg.batch_size)
        idle_batches = 0 if self.world is None else self.world.max_passes(batches) - batches
        completions_by_prompt: dict[int, list[SampledCompletion]] = {}
        for first in range(0, len(copies), gen_cfg.batch_size):
            batch = copies[first : first + gen_cfg.batch_size]
            sampled = self._generate(
                [prompts[i] for i in batch],
                [images[i] if images else () for i in batch],
                gen_cfg,
                with_logprobs,
            )
            for i, completion in zip(batch, sampled, strict=True):
                completions_by_prompt.setdefault(i, []).append(completion)
                if len(completions_by_prompt[i]) == samples_per_prompt:
                    yield i, completions_by_prompt.pop(i)
        for _ in range(idle_batches):
            self._generate([self.stops[:1]], [()], gen_cfg, with_logprobs)

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion, as `Sampler.complete` says.

        Prompts run in one continuous batch, or in fixed ones as they wait if the model's cache
        cannot be merged. They have the autocast state of the code that runs the event loop.
        """
        if self.world is not None:
            raise RuntimeError("complete: processes that share weights need complete_batch")
        _check_temperatures([prompt.temperature], with_logprobs)
        settings = (gen_cfg.top_p, gen_cfg.top_k, gen_cfg.batch_size)
        if settings not in self._queues:
            self._queues[settings] = self._open_queue(gen_cfg)
        return await self._queues[settings].complete(prompt, with_logprobs)

    def _open_queue(self, gen_cfg: SamplingConfig) -> PromptQueue:
        """Return the queue of prompts with these settings."""
        model = unwrap_peft(self.model)
        if has_mergeable_cache(model):
            return ContinuousQueue(
                model,
                TokenChooser(gen_cfg.top_p, gen_cfg.top_k, self.banned_token_ids),
                gen_cfg.batch_size,
                stops=self.stops,
                pad_id=self.pad_id,
                weight_version=lambda: self.weight_version,
            )
        return BatchQueue(
            lambda prompts, with_logprobs: self.complete_batch(
                prompts, gen_cfg, with_logprobs=with_logprobs
            ),
            gen_cfg.batch_size,
        )

    @torch.no_grad()
    def complete_batch(
        self, prompts: Sequence[SeededPrompt], gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Return the completion of each prompt, sampled in fixed batches.

        The same prompts in the same order give the same bits. Batches are those of `sample`: by
        length, with unused ones where another process has more.
        gen_cfg: as of `Sampler.complete`.
        """
        _check_temperatures([prompt.temperature for prompt in prompts], with_logprobs)
        chooser = TokenChooser(gen_cfg.top_p, gen_cfg.top_k, self.banned_token_ids)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        batches = [
            order[first : first + gen_cfg.batch_size]
            for first in range(0, len(order), gen_cfg.batch_size)
        ]
        # Before the first pass: a process without batches would meet the others within theirs
        num_passes = len(batches) if self.world is None else self.world.max_passes(len(batches))
        completions: dict[int, SampledCompletion] = {}
        for batch in batches:
            sampled = self._complete_rows([prompts[i] for i in batch], chooser, with_logprobs)
            completions.update(zip(batch, sampled, strict=True))
        for _ in range(num_passes - len(batches)):
            self._complete_rows([SeededPrompt(self.stops[:1], (), 0.0, 1, 0)], chooser, False)
        return [completions[i] for i in range(len(prompts))]

    def _complete_rows(
        self, prompts: Sequence[SeededPrompt], chooser: TokenChooser, with_logprobs: bool
    ) -> list[SampledCompletion]:
        """Sample one batch of prompts with random streams."""
        processor = SeededChoice(prompts, chooser, self.stops[0])
        max_new_tokens = max(prompt.max_new_tokens for prompt in prompts)
        self._run(
            [prompt.ids for prompt in prompts],
            [prompt.images for prompt in prompts],
            {"do_sample": False, "max_new_tokens": max_new_tokens},
            processor,
        )
        return [
            self._with_versions(completion)
            for completion in processor.completions(self.stops, with_logprobs)
        ]

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Note the version of the weights: the model is the one that is trained."""
        self.weight_version = update

    def stats(self) -> dict[str, float | int | None]:
        """Return no stats."""
        return {}

    def _with_versions(self, completion: SampledCompletion) -> SampledCompletion:
        versions = [self.weight_version] * len(completion.token_ids)
        return replace(completion, versions=versions)

    def close(self) -> None:
        """Do nothing."""

    def _generate(
        self,
        prompts: list[Sequence[int]],
        images: list[Sequence[Image]],
        gen_cfg: SamplingConfig,
        with_logprobs: bool,
    ) -> list[SampledCompletion]:
        """Sample one batch: ids up to the first stop id, and their log-probabilities."""
        _check_temperatures([gen_cfg.temperature], with_logprobs)
        recorder = LogprobRecorder(gen_cfg) if with_logprobs else None
        sampling: dict[str, Any] = {
            "max_new_tokens": gen_cfg.max_new_tokens,
            "suppress_tokens": self.banned_token_ids or None,
            "do_sample": gen_cfg.temperature > 0,
        }
        if recorder is not None:  # the recorder applies these settings itself
            sampling |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        elif sampling["do_sample"]:
            sampling |= gen_cfg.model_dump(include={"temperature", "top_p", "top_k"})
        output = self._run(prompts, images, sampling, recorder)
        width = max(map(len, prompts))
        completions = [_until_stop(row, self.stops) for row in output[:, width:].tolist()]
        if recorder is None:
            rows: list[Any] = [None] * len(completions)
        else:
            logprobs = recorder.logprobs(output).tolist()
            rows = [row[: len(c)] for c, row in zip(completions, logprobs, strict=True)]
        return [
            self._with_versions(SampledCompletion(ids, row))
            for ids, row in zip(completions, rows, strict=True)
        ]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[Image]],
        settings: dict[str, Any],
        processor: Any | None,
    ) -> Tensor:
        """Return what `generate` makes of one batch [B, P + T].

        settings: of its generation config.
        processor: the logits processor, if any.
        """
        from transformers import GenerationConfig as HFGenerationConfig
        from transformers import LogitsProcessorList

        config = HFGenerationConfig(
            eos_token_id=self.stops, pad_token_id=self.pad_id, use_cache=True, **settings
        )
        model = unwrap_peft(self.model)  # peft's generate leaves our settings in it
        device = next(model.parameters()).device
        ids, attended = left_padded(prompts, self.pad_id)
        inputs = {"attention_mask": attended.long().to(device)}
        inputs |= image_inputs(model, ids, attended, images)
        if has_mergeable_cache(model):
            inputs[str(cache_parameter(model))] = RowCache(model.config).cache
        with _with_generation_config(model, config):
            output: Tensor = model.generate(
                input_ids=ids.to(device),
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([processor] if processor else []),
                synced_gpus=self.world is not None,
            )
        return output


class LogprobRecorder:
    """A logits processor that applies temperature, top_k and top_p, and records log-probabilities.

    They are of the sampled tokens in that distribution. It keeps one step's [B, V] at a time.
    """

    def __init__(self, gen_cfg: SamplingConfig) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self.temperature = gen_cfg.temperature
        self._cuts: list[Any] = []
        if gen_cfg.top_k > 0:
            self._cuts.append(TopKLogitsWarper(gen_cfg.top_k))
        if gen_cfg.top_p < 1:
            self._cuts.append(TopPLogitsWarper(gen_cfg.top_p))
        self._chosen: list[Tensor] = []  # [B] each
        self._last: Tensor | None = None  # [B, V]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits [B, V] to sample from.

        input_ids: [B, P + t].
        scores: logits [B, V] of the next token.
        """
        self._note(input_ids[:, -1])
        scaled = scores.float() / self.temperature
        for cut in self._cuts:
            scaled = cut(input_ids, scaled)
        self._last = scaled.log_softmax(-1)
        return scaled

    def _note(self, sampled_ids: Tensor) -> None:
        if self._last is not None:
            self._chosen.append(self._last.gather(-1, sampled_ids[:, None]).squeeze(-1))

    def logprobs(self, output: Tensor) -> Tensor:
        """Return log-probabilities [B, T] for the output [B, P + T] of `generate`."""
        self._note(output[:, -1])
        self._last = None
        return torch.stack(self._chosen, dim=-1)


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
