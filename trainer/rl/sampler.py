"""The protocol of samplers, which produce completions.

`Sampler` has two implementations: trainer/rl/engines/generate.py samples in this process,
trainer/rl/engines/vllm.py asks a vLLM server. A prompt is a list of ids: an episode continues from
all its ids so far, and from all images that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig
from trainer.rl.forward import Image


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One sampled completion.

    token_ids: the ids up to and with the stop id.
    logprobs: of those ids in the distribution that they were sampled from (temperature, top_k and
    top_p applied); None if not requested.
    versions: of the weights that each id was sampled with (see `Rollout.weight_versions`); None if
    the sampler does not know.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    versions: list[int] | None = None


@dataclass(frozen=True, slots=True)
class SeededPrompt:
    """One prompt with a random stream of its own.

    Its completion depends on the weights and on these fields only: not on the prompts that are
    sampled beside it, nor on their order.
    ids: all ids so far.
    images: the images that they stand for, in the order of the ids.
    temperature: 0 is greedy, which has no log-probabilities.
    max_new_tokens: length of the longest completion.
    seed: of the random stream, which has one uniform number for each sampled token.
    affinity: prompts that share it begin alike, as the turns of one trajectory do: a sampler of
    several servers prefers the one that has computed that beginning, and the one of this process
    keeps it. It changes no completion, but for rounding.
    """

    ids: Sequence[int]
    images: Sequence[Image]
    temperature: float
    max_new_tokens: int
    seed: int
    affinity: str = ""


class CompletionFailed(UserError):
    """A sampler has no completion of a prompt: no answer in time, or not one that can be used.

    Other prompts may have theirs.
    """


class Sampler(Protocol):
    """Produces completions."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        gen_cfg: SamplingConfig,
        *,
        images: Sequence[Sequence[Image]] | None = None,
        seed: int | None = None,
        with_logprobs: bool = True,
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Yield (index of a prompt, its num_samples_per_prompt completions), each when it is ready.

        The order is arbitrary.
        images: the images of each prompt, in the order of its ids.
        seed: with the same weights it gives the same completions; None: use the random state.
        """
        ...

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion.

        Several may run at the same time, in one event loop; a cancelled one is dropped.
        gen_cfg: its top_p, top_k and batch_size (the most rows that run at once) apply; its
        temperature and max_new_tokens do not, because the prompt has its own.
        Raises CompletionFailed if there is none for this prompt.
        """
        ...

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Sample from these weights from now on; called before the first and after each update.

        update: their version. A vLLM sampler allows this call while other threads sample: a
        completion that has begun says by its `versions` which tokens have which weights.
        """
        ...

    def stats(self) -> dict[str, float | int | None]:
        """Return stats of this process since the last call, for log.jsonl."""
        ...

    def close(self) -> None:
        """Close connections and remove files."""
        ...


@contextmanager
def preserve_rng_state(model: nn.Module, seed: int) -> Iterator[None]:
    """Run in eval mode with this seed, then restore the model's mode and the random state."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    was_training = model.training
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def check_untruncated(gen_cfg: SamplingConfig, corrected: bool = False) -> None:
    """Raise UserError if log-probabilities would not be of the distribution that is sampled from.

    corrected: whether the importance correction accounts for top_p and top_k.
    """
    if gen_cfg.temperature == 0:
        raise UserError("generation.temperature: 0 is greedy; training needs samples")
    for key, on in (("top_p", gen_cfg.top_p < 1), ("top_k", gen_cfg.top_k > 0)):
        if on and not corrected:
            raise UserError(
                f"generation.{key}: {getattr(gen_cfg, key)} truncates the distribution, and ratios "
                "to the full one would be wrong. Set rl.importance_correction to auto or on, or "
                "train with top_p 1 and top_k 0 (eval has its own settings)"
            )
