"""Rollouts: completions with the ids that were sampled, never tokenised again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor, nn

from scorekit.errors import UserError
from trainer.config import GenerationConfig
from trainer.data import Example, format_translation_prompt, postprocess_translation
from trainer.loss import token_logprobs
from trainer.offsets import DecodeConfig, align_completion
from trainer.policy import (
    completion_logits,
    embedding_rows,
    micro_batches,
    pad_token_id,
    stop_token_ids,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rollout:
    """One sampled translation. The arrays have one entry for each completion token.

    example_id, group: the example, and its place among the prompts of the batch (samples of one
        prompt share it).
    completion_text: after post-processing; what is scored, and what token_char_offsets refer to.
    completion_token_ids: as sampled, with the EOS where one came (finish_reason "eos").
    old_logprobs: log-probabilities under the policy that sampled, at its temperature.
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

    def __post_init__(self) -> None:
        tokens = len(self.completion_token_ids)
        for name in ("token_char_offsets", "old_logprobs", "ref_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"{self.example_id}: {len(values)} {name} for {tokens} completion tokens"
                )

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_input_ids) + len(self.completion_token_ids)


def build_prompt(example: Example, tokenizer: Any, template: str) -> tuple[str, list[int]]:
    """The prompt's text and ids: one user turn of the chat template where the tokenizer has one
    (thinking off where it knows of thinking), else the plain text with its special tokens.

    A chat template that refuses a turn of plain text is given the form that TranslateGemma's wants,
    source text and language codes, of which it makes the whole prompt; `template` is not used then.
    Raises UserError where it refuses that, too.
    """
    text = format_translation_prompt(example, template)
    if not getattr(tokenizer, "chat_template", None):
        return text, list(tokenizer(text)["input_ids"])
    structured = {
        "type": "text",
        "source_lang_code": example.src_lang_code,
        "target_lang_code": example.tgt_lang_code,
        "text": example.src_text,
    }
    try:
        text = _chat_prompt(tokenizer, text)
    except TemplateError as error:
        try:
            text = _chat_prompt(tokenizer, [structured])
        except TemplateError as second:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} takes neither a "
                f"turn of plain text ({error}) nor TranslateGemma's form ({second}); name another "
                "tokenizer in policy.tokenizer, or mend its chat template"
            ) from None
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_prompt(tokenizer: Any, content: str | list[dict[str, str]]) -> str:
    prompt: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return prompt


def check_prompts(
    examples: Sequence[Example], model: nn.Module, tokenizer: Any, gen_cfg: GenerationConfig
) -> list[tuple[str, list[int]]]:
    """The prompt of each example. Raises UserError that names the first that cannot be built, does
    not fit beside `max_new_tokens`, or has an id that the model does not know."""
    config = model.config
    if hasattr(config, "get_text_config"):  # of a model that also sees: the part that reads
        config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rows = embedding_rows(model)
    prompts = []
    for example in examples:
        try:
            prompt = build_prompt(example, tokenizer, gen_cfg.prompt_template)
        except UserError as error:
            raise UserError(f"example {example.id}: {error}") from None
        ids = prompt[1]
        if limit is not None and len(ids) + gen_cfg.max_new_tokens > limit:
            raise UserError(
                f"example {example.id}: a prompt of {len(ids)} tokens and max_new_tokens "
                f"{gen_cfg.max_new_tokens} exceed the policy's {limit} positions"
            )
        if not ids or max(ids) >= rows:
            fault = f"has the id {max(ids)} (embeddings: {rows})" if ids else "is empty"
            raise UserError(f"example {example.id}: the prompt {fault}")
        prompts.append(prompt)
    return prompts


def check_uncut(gen_cfg: GenerationConfig) -> None:
    """Raise UserError where log-probabilities would not be of the distribution sampled from."""
    if gen_cfg.temperature == 0:
        raise UserError("generation.temperature: 0 is greedy; training needs samples")
    for key, on in (("top_p", gen_cfg.top_p < 1), ("top_k", gen_cfg.top_k > 0)):
        if on:
            raise UserError(
                f"generation.{key}: {getattr(gen_cfg, key)} cuts the distribution, and ratios to "
                "the uncut one would be wrong: train with top_p 1 and top_k 0 (eval has its own)"
            )


@torch.no_grad()
def generate_rollouts(
    examples: Sequence[Example],
    policy_model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    reference_model: nn.Module | None = None,
    with_logprobs: bool = True,
    micro_batch_tokens: int = 4096,
    postprocess: Callable[[str], str] = postprocess_translation,
) -> list[Rollout]:
    """Sample `gen_cfg.num_samples_per_prompt` completions of each example, in order.

    Prompts are batched by length. `old_logprobs` are those of the distribution that the sampler
    drew from, noted while it drew; `ref_logprobs` come from a forward pass at the same
    temperature.
    with_logprobs: off for an evaluation; on, it needs a temperature above 0, top_p 1, top_k 0.
    Raises UserError on settings or a prompt that cannot be.
    """
    if with_logprobs:
        check_uncut(gen_cfg)
    prompts = check_prompts(examples, policy_model, tokenizer, gen_cfg)
    stops = stop_token_ids(policy_model, tokenizer)
    pad_id = pad_token_id(policy_model, tokenizer)
    copies = [i for i in range(len(examples)) for _ in range(gen_cfg.num_samples_per_prompt)]
    by_length = sorted(range(len(copies)), key=lambda place: len(prompts[copies[place]][1]))
    completions: list[tuple[list[int], list[float] | None]] = [([], None) for _ in copies]
    for first in range(0, len(copies), gen_cfg.batch_size):
        places = by_length[first : first + gen_cfg.batch_size]
        batch = [prompts[copies[place]][1] for place in places]
        sampled = _generate(policy_model, batch, gen_cfg, stops, pad_id, with_logprobs)
        for place, completion in zip(places, sampled, strict=True):
            completions[place] = completion
    decode_cfg = DecodeConfig(postprocess)
    rollouts = [
        _rollout(examples[i], i, prompts[i], completions[place], tokenizer, decode_cfg, stops)
        for place, i in enumerate(copies)
    ]
    if reference_model is not None:
        _add_reference_logprobs(
            rollouts, reference_model, gen_cfg.temperature, pad_id, micro_batch_tokens
        )
    return rollouts


def _rollout(
    example: Example,
    group: int,
    prompt: tuple[str, list[int]],
    completion: tuple[list[int], list[float] | None],
    tokenizer: Any,
    decode_cfg: DecodeConfig,
    stops: Sequence[int],
) -> Rollout:
    completion_ids, logprobs = completion
    alignment = align_completion(tokenizer, completion_ids, decode_cfg, stops)
    return Rollout(
        example_id=example.id,
        group=group,
        src_text=example.src_text,
        prompt_text=prompt[0],
        prompt_input_ids=prompt[1],
        completion_text=alignment.text,
        completion_token_ids=completion_ids,
        token_char_offsets=alignment.offsets,
        finish_reason="eos" if completion_ids[-1] in stops else "length",
        old_logprobs=logprobs,
        unaligned_tokens=alignment.unaligned,
    )


def _generate(
    model: nn.Module,
    prompts: list[list[int]],
    gen_cfg: GenerationConfig,
    stops: list[int],
    pad_id: int,
    with_logprobs: bool,
) -> list[tuple[list[int], list[float] | None]]:
    """One batch through `generate()`: ids up to the first stop id, and their log-probabilities."""
    from transformers import GenerationConfig as HFGenerationConfig
    from transformers import LogitsProcessorList

    recorder = LogprobRecorder(gen_cfg.temperature) if with_logprobs else None
    sampling: dict[str, Any] = {"do_sample": gen_cfg.temperature > 0}
    if sampling["do_sample"]:
        temperature = 1.0 if recorder else gen_cfg.temperature  # the recorder divides by it
        sampling |= {"temperature": temperature, "top_p": gen_cfg.top_p, "top_k": gen_cfg.top_k}
    config = HFGenerationConfig(
        max_new_tokens=gen_cfg.max_new_tokens,
        eos_token_id=stops,
        pad_token_id=pad_id,
        use_cache=True,
        **sampling,
    )
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)  # [B, P]
    attended = torch.zeros_like(ids)  # [B, P]
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attended[row, width - len(prompt) :] = 1
    with _own_generation_config(model, config):
        output = model.generate(
            input_ids=ids.to(device),
            attention_mask=attended.to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder] if recorder else []),
        )
    completions = [_until_stop(row, stops) for row in output[:, width:].tolist()]
    if recorder is None:
        return [(completion, None) for completion in completions]
    rows = recorder.logprobs(output).tolist()
    return [(done, row[: len(done)]) for done, row in zip(completions, rows, strict=True)]


class LogprobRecorder:
    """A logits processor that applies the temperature and notes the log-probability of each token
    that is drawn from the result. It holds one step's [B, V] at a time."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._chosen: list[Tensor] = []  # [B] each
        self._last: Tensor | None = None  # [B, V]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [B, P + t]; scores: logits [B, V] of the token that comes next."""
        self._note(input_ids[:, -1])
        scaled = scores.float() / self.temperature
        self._last = scaled.log_softmax(-1)
        return scaled

    def _note(self, drawn: Tensor) -> None:
        if self._last is not None:
            self._chosen.append(self._last.gather(-1, drawn[:, None]).squeeze(-1))

    def logprobs(self, output: Tensor) -> Tensor:
        """[B, T] for the output [B, P + T] of `generate`."""
        self._note(output[:, -1])
        self._last = None
        return torch.stack(self._chosen, dim=-1)


@contextmanager
def _own_generation_config(model: nn.Module, config: Any) -> Iterator[None]:
    """`generate` fills every field that has its default value from the model's own generation
    config (a temperature of 1 would become the folder's 0.6): so put ours in its place."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    """Up to the first stop id, which belongs to the completion; padding behind it does not."""
    for index, token_id in enumerate(ids):
        if token_id in stops:
            return ids[: index + 1]
    return ids


def _add_reference_logprobs(
    rollouts: list[Rollout],
    reference: nn.Module,
    temperature: float,
    pad_id: int,
    micro_batch_tokens: int,
) -> None:
    lengths = [rollout.length for rollout in rollouts]
    for batch in micro_batches(lengths, micro_batch_tokens):
        logits, ids, _ = completion_logits(
            reference,
            [rollouts[index].prompt_input_ids for index in batch],
            [rollouts[index].completion_token_ids for index in batch],
            pad_id,
        )
        logprobs, _ = token_logprobs(logits, ids, temperature)
        for index, row in zip(batch, logprobs.tolist(), strict=True):
            rollouts[index].ref_logprobs = row[: len(rollouts[index].completion_token_ids)]
