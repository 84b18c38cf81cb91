"""Sampling in this process, by transformers' `generate()`.

Shapes: B sequences, P tokens of the longest prompt, T of the longest completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import Image, image_inputs
from trainer.rl.policy.tokens import pad_token_id, stop_token_ids
from trainer.rl.policy.wrappers import unwrap_distributed, unwrap_peft
from trainer.rl.sampler import SampledCompletion


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

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Do nothing: the model is the one that is trained."""

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
        from transformers import GenerationConfig as HFGenerationConfig
        from transformers import LogitsProcessorList

        if with_logprobs and gen_cfg.temperature == 0:
            raise ValueError("greedy ids have no log-probabilities: with_logprobs must be off")
        recorder = LogprobRecorder(gen_cfg) if with_logprobs else None
        sampling: dict[str, Any] = {"do_sample": gen_cfg.temperature > 0}
        if recorder is not None:  # the recorder applies these settings itself
            sampling |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        elif sampling["do_sample"]:
            sampling |= gen_cfg.model_dump(include={"temperature", "top_p", "top_k"})
        config = HFGenerationConfig(
            max_new_tokens=gen_cfg.max_new_tokens,
            eos_token_id=self.stops,
            pad_token_id=self.pad_id,
            use_cache=True,
            suppress_tokens=self.banned_token_ids or None,
            **sampling,
        )
        model = unwrap_peft(self.model)  # peft's generate leaves our settings in it
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)  # [B, P]
        attended = torch.zeros(ids.shape, dtype=torch.bool)  # [B, P]
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attended[row, width - len(prompt) :] = True
        inputs = {"attention_mask": attended.long().to(device)}
        inputs |= image_inputs(model, ids, attended, images)
        with _with_generation_config(model, config):
            output = model.generate(
                input_ids=ids.to(device),
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([recorder] if recorder else []),
                synced_gpus=self.world is not None,
            )
        completions = [_until_stop(row, self.stops) for row in output[:, width:].tolist()]
        if recorder is None:
            return [SampledCompletion(completion, None) for completion in completions]
        rows = recorder.logprobs(output).tolist()
        return [
            SampledCompletion(c, row[: len(c)]) for c, row in zip(completions, rows, strict=True)
        ]


class LogprobRecorder:
    """A logits processor that applies temperature, top_k and top_p, and records log-probabilities.

    They are those of the sampled tokens, in the resulting distribution. It keeps one step's [B, V]
    at a time.
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
