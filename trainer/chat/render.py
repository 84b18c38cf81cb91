"""Convert messages to text and ids, and find the ids that the model writes, or ends with.

A template marks the assistant's turns with `{% generation %}` and `{% endgeneration %}`. The
tokenizer's offsets tell which ids are in a span. A character (Korean, emoji) may have several
tokens; all of them are in the span. Sampling ends at the ids of the generation config.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig

#: `{"role": "system" | "user" | "assistant" | "tool", "content": text}`, and other fields that a
#: template uses (`reasoning_content`, `tool_calls`).
Turns: TypeAlias = Sequence[dict[str, Any]]
Span: TypeAlias = tuple[int, int]


class Rendered(NamedTuple):
    """The text of a conversation.

    spans: the characters that the assistant writes, in order.
    """

    text: str
    spans: tuple[Span, ...]


class Tokens(NamedTuple):
    """The tokens of a rendered conversation.

    ids: [L].
    owners: [L], the number of the span that has all characters of a token, else -1.
    """

    ids: list[int]
    owners: list[int]


def read_template(path: str) -> str:
    """Return a chat template from a file. Raises UserError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"chat.template: {path}: cannot be read: {reason}") from None


def own_template(tokenizer: Any) -> str | None:
    """Return the template of a tokenizer; of several, the one with the name `default`."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def use_template(tokenizer: Any, chat: ChatConfig) -> Any:
    """Set the config's template in the tokenizer, and return it.

    Raises UserError if neither has a template.
    """
    if chat.template is not None:
        tokenizer.chat_template = read_template(chat.template)
    if own_template(tokenizer) is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template. Set chat.template"
        )
    return tokenizer


def render(
    tokenizer: Any,
    messages: Turns,
    chat: ChatConfig,
    *,
    template: str | None = None,
    generation_prompt: bool = False,
) -> str:
    """Return the text of a conversation.

    template: default: the tokenizer's own.
    generation_prompt: add the text before a reply of the assistant.
    Raises UserError if the template refuses.
    """
    return _render(tokenizer, messages, chat, template, generation_prompt, spans=False).text


def render_spans(
    tokenizer: Any, messages: Turns, chat: ChatConfig, *, template: str | None = None
) -> Rendered:
    """Return text and spans of its generation markers; no spans if the template has none."""
    return _render(tokenizer, messages, chat, template, False, spans=True)


def tokenize(tokenizer: Any, rendered: Rendered) -> Tokens:
    """Return the ids of a conversation with their spans. Raises UserError without offsets."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} is a slow tokenizer without offsets. "
            "Save it with its tokenizer.json"
        )
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    owners, spans, index = [], rendered.spans, 0
    for start, end in encoded["offset_mapping"]:
        while index < len(spans) and start >= spans[index][1]:
            index += 1
        inside = index < len(spans) and spans[index][0] <= start and end <= spans[index][1]
        owners.append(index if inside else -1)
    return Tokens(list(encoded["input_ids"]), owners)


def _render(
    tokenizer: Any,
    messages: Turns,
    chat: ChatConfig,
    template: str | None,
    generation_prompt: bool,
    *,
    spans: bool,
) -> Rendered:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **chat.template_kwargs}
    result: Any
    try:
        result = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template or own_template(tokenizer),
            add_generation_prompt=generation_prompt,
            return_assistant_tokens_mask=spans,
            **variables,
        )
    except Exception as error:  # a template is a program, which may raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses: {reason}") from None
    texts, spans_by_text = result
    return Rendered(texts[0], tuple(spans_by_text[0]) if spans else ())


def load_generation_config(model: str, revision: str | None = None) -> Any:
    """Return the generation config of a model's folder or hub id.

    If there is none, it is made from `config.json`, as sampling does; None without both.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError):
        pass
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except Exception:  # transformers raises many types; who loads the model reports its config
        return None
    return GenerationConfig.from_model_config(config)


def end_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Return the ids that end sampling: the generation config's, or else the tokenizer's."""
    value = getattr(generation_config, "eos_token_id", None)
    if value is None:
        value = tokenizer.eos_token_id
    if isinstance(value, list | tuple):
        return [int(token_id) for token_id in value]
    return [] if value is None else [int(value)]
