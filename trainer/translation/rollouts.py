"""Sample rollouts of examples, and locate each token in the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scorekit.credit.offsets import DecodeConfig, align_completion
from scorekit.prompts import load_postprocess
from trainer.rl.policy import pad_token_id, stop_token_ids, unwrap_distributed
from trainer.rl.rollout import Rollout, RolloutBatch, rollout_logprobs
from trainer.rl.sampler import SampledCompletion, Sampler, check_untruncated
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example
from trainer.translation.prompting import Prompt, check_prompts, prompt_text


@dataclass(slots=True, kw_only=True)
class TranslationRollout(Rollout):
    """One sampled translation.

    example_id: of the example.
    pair: its languages, "en-US>ko-KR".
    completion_text: after post-processing; the text that is scored and that token_char_offsets
    refer to.
    unaligned_tokens: number of tokens whose position in completion_text is unknown.
    ref_text: a reference translation, for `w_chrf` only; never sent to a service.
    """

    example_id: str
    src_text: str
    prompt_text: str
    completion_text: str
    token_char_offsets: list[tuple[int, int]]
    unaligned_tokens: int = 0
    pair: str = ""
    ref_text: str | None = None

    def __post_init__(self) -> None:
        Rollout.__post_init__(self)
        self.check_lengths("token_char_offsets")

    @property
    def scored_text(self) -> tuple[str, str, str, str]:
        """Return source, translation, and their languages ("" if unknown)."""
        src_lang, _, tgt_lang = self.pair.partition(">")
        return self.src_text, self.completion_text, src_lang, tgt_lang

    @property
    def reward_fields(self) -> dict[str, Any]:
        """Return what services and rules read of it, by their names; None where there is none."""
        src, mt, src_lang, tgt_lang = self.scored_text
        texts = {"src": src, "mt": mt, "src_lang": src_lang or None, "tgt_lang": tgt_lang or None}
        return texts | {"ref": self.ref_text, "finish_reason": self.finish_reason}


def stream_rollouts(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    seed: int | None = None,
    with_logprobs: bool = True,
    groups: Sequence[int] | None = None,
    postprocess: Callable[[str], str] | None = None,
) -> Iterator[list[TranslationRollout]]:
    """Yield the samples of one prompt after another, each when it is generated.

    groups: `group` of each prompt; default: its index.
    postprocess: default: the config's.
    """
    stops = stop_token_ids(unwrap_distributed(policy_model), tokenizer)
    decode_cfg = DecodeConfig(postprocess or load_postprocess(gen_cfg.postprocess))
    ids = [prompt.ids.tolist() for prompt in prompts]
    group_of = range(len(prompts)) if groups is None else groups
    for i, completions in sampler.sample(ids, gen_cfg, seed=seed, with_logprobs=with_logprobs):
        text = prompt_text(prompts[i].example, tokenizer, gen_cfg.prompt_template)
        yield [
            build_rollout(
                prompts[i], text, (group_of[i], sample), done, tokenizer, decode_cfg, stops
            )
            for sample, done in enumerate(completions)
        ]


def generate_rollouts(
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    prompts: Sequence[Prompt] | None = None,
    sampler: Sampler | None = None,
    seed: int | None = None,
    reference_model: nn.Module | None = None,
    with_logprobs: bool = True,
    micro_batch_tokens: int = 4096,
    postprocess: Callable[[str], str] | None = None,
) -> RolloutBatch[TranslationRollout]:
    """Sample `gen_cfg.num_samples_per_prompt` completions of each example, in order.

    `old_logprobs` are those of the distribution that was sampled from, recorded during sampling;
    `ref_logprobs` come from a forward pass at the same temperature. `update_policy` takes the
    returned list as it is.
    prompts: of these examples, if they exist already.
    sampler: default: this process.
    with_logprobs: off for an evaluation.
    postprocess: default: the config's.
    Raises UserError for invalid settings or prompts.
    """
    from trainer.rl.engines.generate import GenerateSampler

    if with_logprobs:
        check_untruncated(gen_cfg)
    if prompts is None:
        prompts = check_prompts(examples, unwrap_distributed(policy_model), tokenizer, gen_cfg)
    groups = stream_rollouts(
        sampler or GenerateSampler(policy_model, tokenizer),
        prompts,
        policy_model,
        tokenizer,
        gen_cfg,
        seed=seed,
        with_logprobs=with_logprobs,
        postprocess=postprocess,
    )
    rollouts = RolloutBatch(
        (rollout for group in sorted(groups, key=lambda g: g[0].group) for rollout in group),
        policy_model=policy_model,
        temperature=gen_cfg.temperature,
        pad_id=pad_token_id(unwrap_distributed(policy_model), tokenizer),
    )
    if reference_model is not None:
        rows = rollout_logprobs(
            rollouts, reference_model, gen_cfg.temperature, rollouts.pad_id, micro_batch_tokens
        )
        for rollout, row in zip(rollouts, rows, strict=True):
            rollout.ref_logprobs = row
    return rollouts


def build_rollout(
    prompt: Prompt,
    text: str,
    indices: tuple[int, int],
    completion: SampledCompletion,
    tokenizer: Any,
    decode_cfg: DecodeConfig,
    stops: Sequence[int],
) -> TranslationRollout:
    """Return a rollout.

    indices: its group, and its number in the group.
    """
    example = prompt.example
    alignment = align_completion(tokenizer, completion.token_ids, decode_cfg, stops)
    return TranslationRollout(
        example_id=example.id,
        group=indices[0],
        trajectory_id=f"{indices[0]}-{indices[1]}",
        src_text=example.src_text,
        prompt_text=text,
        prompt_input_ids=prompt.ids.tolist(),
        completion_text=alignment.text,
        completion_token_ids=completion.token_ids,
        token_char_offsets=alignment.offsets,
        finish_reason="eos" if completion.token_ids[-1] in stops else "length",
        old_logprobs=completion.logprobs,
        weight_versions=completion.versions,
        unaligned_tokens=alignment.unaligned,
        pair=f"{example.src_lang_code}>{example.tgt_lang_code}",
        ref_text=example.ref_text,
    )
