"""Build prompts of examples, with the chat template if there is one, and check them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from torch import nn

from scorekit.errors import UserError
from trainer.rl.policy.tokens import embedding_rows
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example, format_translation_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of an example.

    ids: four bytes each, because a run keeps those of all its examples. For the same reason the
    text is built again on demand (`prompt_text`).
    """

    example: Example
    ids: array[int]


def build_prompt(example: Example, tokenizer: Any, template: str) -> tuple[str, list[int]]:
    """Return the prompt's text and ids. Raises UserError as `prompt_text`."""
    text = prompt_text(example, tokenizer, template)
    with_specials = not getattr(tokenizer, "chat_template", None)
    return text, list(tokenizer(text, add_special_tokens=with_specials)["input_ids"])


def prompt_text(example: Example, tokenizer: Any, template: str) -> str:
    """Return one user turn of the tokenizer's chat template, or the plain text without one.

    Thinking is off if the template supports it. The tokenizer adds its special tokens to plain
    text.
    If a chat template refuses a turn of plain text, it gets the form of TranslateGemma's template:
    source text and language codes, from which it makes the full prompt; `template` is not used
    then. Raises UserError if it refuses that, too.
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
        except TemplateError as structured_error:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} takes neither a "
                f"turn of plain text ({error}) nor TranslateGemma's form ({structured_error}). "
                "Name another tokenizer in policy.tokenizer, or correct its chat template"
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
    """A prompt that does not fit into the policy with `max_new_tokens`."""


def fitting_prompts(
    key: str,
    examples: Sequence[Example],
    model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
    *,
    refuse: bool,
) -> tuple[list[Prompt], str]:
    """Return the prompts that fit into the policy, and a line on the others ("" without any).

    key: config key of the examples (`data.train`).
    refuse: raise UserError if some do not fit.
    Raises UserError also if no prompt fits, and as `check_prompts`.
    """
    prompts: list[Prompt] = []
    errors: list[str] = []
    for example in examples:
        try:
            prompts += check_prompts([example], model, tokenizer, gen_cfg)
        except OverlongPrompt as error:
            errors.append(f"{example.location}: {error}" if example.location else str(error))
    if not errors:
        return prompts, ""
    message = f"{key}: {len(errors)} of {len(examples)} prompts are too long; {errors[0]}"
    if refuse or not prompts:
        raise UserError(f"{message}. Remove such rows, or lower max_new_tokens")
    return prompts, f"{message}; left out (data.overlong_prompts)"


def check_prompts(
    examples: Sequence[Example], model: nn.Module, tokenizer: Any, gen_cfg: GenerationConfig
) -> list[Prompt]:
    """Return the prompt of each example.

    Raises UserError that names the first that cannot be built, does not fit with `max_new_tokens`,
    or has an id that the model has no embedding for.
    """
    config = model.config
    if hasattr(config, "get_text_config"):  # the text part of a model that also reads images
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
            problem = f"has the id {max(ids)} (embeddings: {rows})" if ids else "is empty"
            raise UserError(f"example {example.id}: the prompt {problem}")
        prompts.append(Prompt(example, array("i", ids)))
    return prompts
