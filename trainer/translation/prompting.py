"""Examples -> prompts: the chat template where there is one, checked before anything is sampled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from torch import nn

from scorekit.errors import UserError
from trainer.rl.policy import embedding_rows
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example, format_translation_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy reads of an example. ids: four bytes each, since a run keeps those of all
    its examples. text: made again where it is wanted, for the same reason (`prompt_text`)."""

    example: Example
    ids: array[int]


def build_prompt(example: Example, tokenizer: Any, template: str) -> tuple[str, list[int]]:
    """The prompt's text and ids. Raises UserError as `prompt_text`."""
    text = prompt_text(example, tokenizer, template)
    with_specials = not getattr(tokenizer, "chat_template", None)
    return text, list(tokenizer(text, add_special_tokens=with_specials)["input_ids"])


def prompt_text(example: Example, tokenizer: Any, template: str) -> str:
    """One user turn of the chat template where the tokenizer has one (thinking off where it knows
    of thinking), else the plain text, to which the tokenizer adds its special tokens.

    A chat template that refuses a turn of plain text is given the form that TranslateGemma's wants,
    source text and language codes, of which it makes the whole prompt; `template` is not used then.
    Raises UserError where it refuses that, too.
    """
    text = format_translation_prompt(example, template)
    if not getattr(tokenizer, "chat_template", None):
        return text
    structured = {
        "type": "text",
        "source_lang_code": example.src_lang_code,
        "target_lang_code": example.tgt_lang_code,
        "text": example.src_text,
    }
    try:
        return _chat_prompt(tokenizer, text)
    except TemplateError as error:
        try:
            return _chat_prompt(tokenizer, [structured])
        except TemplateError as second:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} takes neither a "
                f"turn of plain text ({error}) nor TranslateGemma's form ({second}); name another "
                "tokenizer in policy.tokenizer, or mend its chat template"
            ) from None


def _chat_prompt(tokenizer: Any, content: str | list[dict[str, str]]) -> str:
    prompt: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return prompt


class OverlongPrompt(UserError):
    """A prompt that does not fit into the policy beside `max_new_tokens`."""


def fitting_prompts(
    key: str,
    examples: Sequence[Example],
    model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    refuse: bool,
) -> tuple[list[Prompt], str]:
    """The prompts that fit into the policy, and a line on the others ("" where there are none).
    Raises UserError where those are to be refused or there are no others, and what else
    `check_prompts` raises.

    key: where the examples come from (`data.train`).
    """
    prompts: list[Prompt] = []
    faults: list[str] = []
    for example in examples:
        try:
            prompts += check_prompts([example], model, tokenizer, gen_cfg)
        except OverlongPrompt as error:
            faults.append(f"{example.where}: {error}" if example.where else str(error))
    if not faults:
        return prompts, ""
    told = f"{key}: {len(faults)} of {len(examples)} prompts are too long; {faults[0]}"
    if refuse or not prompts:
        raise UserError(f"{told}; remove such rows, or lower max_new_tokens")
    return prompts, f"{told}; left out (data.overlong_prompts)"


def check_prompts(
    examples: Sequence[Example], model: nn.Module, tokenizer: Any, gen_cfg: GenerationConfig
) -> list[Prompt]:
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
            _, ids = build_prompt(example, tokenizer, gen_cfg.prompt_template)
        except UserError as error:
            raise UserError(f"example {example.id}: {error}") from None
        if limit is not None and len(ids) + gen_cfg.max_new_tokens > limit:
            raise OverlongPrompt(
                f"example {example.id}: a prompt of {len(ids)} tokens and max_new_tokens "
                f"{gen_cfg.max_new_tokens} exceed the policy's {limit} positions"
            )
        if not ids or max(ids) >= rows:
            fault = f"has the id {max(ids)} (embeddings: {rows})" if ids else "is empty"
            raise UserError(f"example {example.id}: the prompt {fault}")
        prompts.append(Prompt(example, array("i", ids)))
    return prompts
