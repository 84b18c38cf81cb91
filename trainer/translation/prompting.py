"""Build prompts of examples, with the chat template if there is one, and check them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from torch import nn

from scorekit.errors import UserError
from trainer.rl.control_tokens import control_tokens
from trainer.rl.policy import embedding_rows, plain_prompt_ids
from trainer.translation.config import GenerationConfig
from trainer.translation.data import Example, format_translation_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of an example.

    ids: four bytes each, because a run keeps those of all its examples. For the same reason the
    text is built again on demand (`prompt_text`).
    has_control_tokens: the source has control tokens of the model, which the prompt has as text.
    """

    example: Example
    ids: array[int]
    has_control_tokens: bool = False


def build_prompt(example: Example, tokenizer: Any, template: str) -> tuple[str, list[int]]:
    """Return the prompt's text and ids. Raises UserError as `prompt_text`."""
    text = prompt_text(example, tokenizer, template)
    return text, _prompt_ids(text, tokenizer)


def _prompt_ids(text: str, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return plain_prompt_ids(tokenizer, text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def without_control_tokens(example: Example, tokenizer: Any) -> Example:
    """Return the example with its control tokens as text, so that a source cannot end its turn.

    An example without any is returned as it is. Raises UserError if a token cannot be written as
    text.
    """
    controls = control_tokens(tokenizer)
    fields = ("src_text", "src_lang", "tgt_lang", "src_lang_code", "tgt_lang_code")
    if not controls.find("\n".join(getattr(example, field) for field in fields), "outside"):
        return example
    return replace(
        example, **{field: controls.as_text(getattr(example, field), "outside") for field in fields}
    )


def prompt_text(example: Example, tokenizer: Any, template: str) -> str:
    """Return one user turn of the tokenizer's chat template, or the plain text without one.

    Thinking is off if the template supports it. The source's control tokens become text. The
    tokenizer adds its special tokens before plain text.
    If a chat template refuses a turn of plain text, it gets the form of TranslateGemma's template:
    source text and language codes, from which it makes the full prompt; `template` is not used
    then. Raises UserError if it refuses that, too.
    """
    return _render(without_control_tokens(example, tokenizer), tokenizer, template)


def _render(example: Example, tokenizer: Any, template: str) -> str:
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
    """Return the prompts that fit into the policy, and a line on the others and on control tokens
    in sources ("" without any).

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
    notes = ". ".join(
        filter(None, (_control_token_note(key, prompts), _end_note(key, prompts, tokenizer)))
    )
    if not errors:
        return prompts, notes
    message = f"{key}: {len(errors)} of {len(examples)} prompts are too long; {errors[0]}"
    if refuse or not prompts:
        raise UserError(f"{message}. Remove such rows, or lower max_new_tokens")
    left_out = f"{message}; left out (data.overlong_prompts)"
    return prompts, f"{left_out}. {notes}" if notes else left_out


def _end_note(key: str, prompts: Sequence[Prompt], tokenizer: Any) -> str:
    """Return a line on tokens at the ends of the prompts that a template has put there; "" if they
    are right."""
    ids, eos, bos = (
        prompts[0].ids if prompts else (),
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
    )
    if ids and ids[-1] == eos:
        return (
            f"{key}: prompts end with {tokenizer.eos_token!r}, after which a model begins another "
            "text. Remove it from the end of the chat template or of generation.prompt_template"
        )
    if bos is not None and list(ids[:2]) == [bos, bos]:
        return (
            f"{key}: prompts begin with {tokenizer.bos_token!r} twice. Remove it from the start of "
            "the chat template or of generation.prompt_template"
        )
    return ""


def _control_token_note(key: str, prompts: Sequence[Prompt]) -> str:
    """Return a line on the prompts whose source has control tokens; "" without any."""
    marked = [prompt.example for prompt in prompts if prompt.has_control_tokens]
    if not marked:
        return ""
    first = marked[0].location or f"example {marked[0].id}"
    return (
        f"{key}: {len(marked)} of {len(prompts)} sources have control tokens of the model, which "
        f"the prompts have as text, with a space inside (first {first})"
    )


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
            safe = without_control_tokens(example, tokenizer)
            ids = _prompt_ids(_render(safe, tokenizer, gen_cfg.prompt_template), tokenizer)
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
        prompts.append(Prompt(example, array("i", ids), safe is not example))
    return prompts
