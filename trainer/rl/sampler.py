"""Rollouts: completions with the ids that were sampled, never tokenised again.

Two engines stand behind one protocol, `Sampler`: trainer/rl/engine_generate.py samples in this
process, trainer/rl/engine_vllm.py asks a vLLM server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess
from trainer.rl.forward import completion_logprobs, micro_batches
from trainer.rl.policy import pad_token_id, stop_token_ids, unwrapped
from trainer.rl.world import World
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.offsets import DecodeConfig, align_completion
from trainer.translation.prompting import check_prompts

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rollout:
    """One sampled translation. The arrays have one entry for each completion token.

    example_id, group: the example, and its place among the prompts of the batch (samples of one
        prompt share it). pair: its languages, "en-US>ko-KR".
    completion_text: after post-processing; what is scored, and what token_char_offsets refer to.
    completion_token_ids: as sampled, with the EOS where one came (finish_reason "eos").
    old_logprobs: log-probabilities under the policy that sampled, at its temperature: log pi_old.
    sampler_logprobs: where old_logprobs were computed anew by the trainer, what the sampler had
        said; else None.
    ref_logprobs: the same under the reference; None without one.
    unaligned_tokens: tokens whose place in completion_text is not known.
    Raises ValueError if the arrays differ in length.
    """

    example_id: str
    group: int
    src_text: str
    prompt_text: str
    prompt_input_ids: list[int]
    completion_text: str
    completion_token_ids: list[int]
    token_char_offsets: list[tuple[int, int]]
    finish_reason: Literal["eos", "length"]
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    unaligned_tokens: int = 0
    sampler_logprobs: list[float] | None = None
    pair: str = ""

    def __post_init__(self) -> None:
        tokens = len(self.completion_token_ids)
        for name in ("token_char_offsets", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"{self.example_id}: {len(values)} {name} for {tokens} completion tokens"
                )

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_input_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: of one completion, up to and with its stop id. logprobs: of those ids in the
    distribution that they were drawn from (temperature, top_k and top_p applied); None unasked."""

    token_ids: list[int]
    logprobs: list[float] | None


class Sampler(Protocol):
    """Who draws completions."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        gen_cfg: GenerationConfig,
        *,
        seed: int | None = None,
        with_logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Sampled]]]:
        """(a prompt's index, its num_samples_per_prompt completions), each as soon as it is there,
        in any order. seed: the same seed and weights give the same completions; None: go on from
        the random state as it is."""
        ...

    def sync(self, model: nn.Module, update: int) -> None:
        """Sample from these weights from now on; called before the first and after each update."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


def check_uncut(gen_cfg: GenerationConfig, corrected: bool = False) -> None:
    """Raise UserError where log-probabilities would not be of the distribution sampled from.

    corrected: the importance correction weighs what top_p and top_k cut.
    """
    if gen_cfg.temperature == 0:
        raise UserError("generation.temperature: 0 is greedy; training needs samples")
    for key, on in (("top_p", gen_cfg.top_p < 1), ("top_k", gen_cfg.top_k > 0)):
        if on and not corrected:
            raise UserError(
                f"generation.{key}: {getattr(gen_cfg, key)} cuts the distribution, and ratios to "
                "the uncut one would be wrong: set rl.importance_correction to auto or on, or "
                "train with top_p 1 and top_k 0 (eval has its own)"
            )


def stream_rollouts(
    sampler: Sampler,
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    seed: int | None = None,
    with_logprobs: bool = True,
    groups: Sequence[int] | None = None,
    postprocess: Callable[[str], str] | None = None,
) -> Iterator[list[Rollout]]:
    """The samples of one prompt after another, each as soon as it is generated.

    groups: `group` of each example; default: its place.
    postprocess: default: the config's.
    Raises UserError on a prompt that cannot be.
    """
    prompts = check_prompts(examples, unwrapped(policy_model), tokenizer, gen_cfg)
    stops = stop_token_ids(unwrapped(policy_model), tokenizer)
    decode_cfg = DecodeConfig(postprocess or load_postprocess(gen_cfg.postprocess))
    ids = [prompt_ids for _, prompt_ids in prompts]
    group_of = range(len(examples)) if groups is None else groups
    for i, completions in sampler.sample(ids, gen_cfg, seed=seed, with_logprobs=with_logprobs):
        yield [
            _rollout(examples[i], group_of[i], prompts[i], done, tokenizer, decode_cfg, stops)
            for done in completions
        ]


def generate_rollouts(
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    sampler: Sampler | None = None,
    seed: int | None = None,
    reference_model: nn.Module | None = None,
    with_logprobs: bool = True,
    micro_batch_tokens: int = 4096,
    postprocess: Callable[[str], str] | None = None,
) -> list[Rollout]:
    """Sample `gen_cfg.num_samples_per_prompt` completions of each example, in order.

    `old_logprobs` are those of the distribution that the sampler drew from, noted while it drew;
    `ref_logprobs` come from a forward pass at the same temperature.
    sampler: default: this process. with_logprobs: off for an evaluation. postprocess: default: the
    config's.
    Raises UserError on settings or a prompt that cannot be.
    """
    from trainer.rl.engine_generate import GenerateSampler

    if with_logprobs:
        check_uncut(gen_cfg)
    groups = stream_rollouts(
        sampler or GenerateSampler(policy_model, tokenizer),
        examples, policy_model, tokenizer, gen_cfg,
        seed=seed, with_logprobs=with_logprobs, postprocess=postprocess,
    )  # fmt: skip
    rollouts = [rollout for group in sorted(groups, key=lambda g: g[0].group) for rollout in group]
    if reference_model is not None:
        rows = rollout_logprobs(
            rollouts, reference_model, gen_cfg.temperature,
            pad_token_id(unwrapped(policy_model), tokenizer), micro_batch_tokens,
        )  # fmt: skip
        for rollout, row in zip(rollouts, rows, strict=True):
            rollout.ref_logprobs = row
    return rollouts


@torch.no_grad()
def rollout_logprobs(
    rollouts: Sequence[Rollout],
    model: nn.Module,
    temperature: float,
    pad_id: int,
    micro_batch_tokens: int,
    world: World | None = None,
) -> list[list[float]]:
    """Log-probability of each completion token under `model`, by forward passes.

    world: the processes that do this side by side, each with rollouts of its own, or none.
    """
    rows: list[list[float]] = [[] for _ in rollouts]
    batches = list(micro_batches([rollout.length for rollout in rollouts], micro_batch_tokens))
    if world is not None:
        model = world.reading(model)
        for _ in range(len(batches), world.most(len(batches))):
            batches.append([])
    for batch in batches:
        if not batch:  # the others still have passes to make, and need this one's weights
            completion_logprobs(model, [[pad_id]], [[pad_id]], temperature, pad_id)
            continue
        logprobs_BT, _, _ = completion_logprobs(
            model,
            [rollouts[index].prompt_input_ids for index in batch],
            [rollouts[index].completion_token_ids for index in batch],
            temperature,
            pad_id,
        )
        for index, row in zip(batch, logprobs_BT.tolist(), strict=True):
            rows[index] = row[: len(rollouts[index].completion_token_ids)]
    return rows


def _rollout(
    example: Example,
    group: int,
    prompt: tuple[str, list[int]],
    completion: Sampled,
    tokenizer: Any,
    decode_cfg: DecodeConfig,
    stops: Sequence[int],
) -> Rollout:
    alignment = align_completion(tokenizer, completion.token_ids, decode_cfg, stops)
    return Rollout(
        example_id=example.id,
        group=group,
        src_text=example.src_text,
        prompt_text=prompt[0],
        prompt_input_ids=prompt[1],
        completion_text=alignment.text,
        completion_token_ids=completion.token_ids,
        token_char_offsets=alignment.offsets,
        finish_reason="eos" if completion.token_ids[-1] in stops else "length",
        old_logprobs=completion.logprobs,
        unaligned_tokens=alignment.unaligned,
        pair=f"{example.src_lang_code}>{example.tgt_lang_code}",
    )
