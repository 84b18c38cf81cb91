"""Messages -> text -> ids, and which of them the model writes.

A template tells the assistant's turns by `{% generation %}` and `{% endgeneration %}` around them.
Which ids lie in a span is told by the tokenizer's offsets. A character (Korean, emoji) may be of
several tokens, and all of them lie in the span.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig

#: `{"role": "system" | "user" | "assistant" | "tool", "content": text}`, and what else a template
#: knows of (`reasoning_content`, `tool_calls`).
Turns: TypeAlias = Sequence[dict[str, Any]]
Span: TypeAlias = tuple[int, int]


class Rendered(NamedTuple):
    """text: of a conversation. spans: the characters that the assistant writes, in order."""

    text: str
    spans: tuple[Span, ...]


class Tokens(NamedTuple):
    """ids, [L], of a rendered conversation; owners, [L]: the number of the span that holds all
    characters of a token, else -1."""

    ids: list[int]
    owners: list[int]


def read_template(path: str) -> str:
    """A chat template in a file. Raises UserError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"chat.template: {path}: cannot be read: {reason}") from None


def own_template(tokenizer: Any) -> str | None:
    """The template that comes with a tokenizer; of several, the one that is named `default`."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def use_template(tokenizer: Any, chat: ChatConfig) -> Any:
    """The tokenizer, with the template that the config names put into it. Raises UserError where
    there is neither that nor one of its own."""
    if chat.template is not None:
        tokenizer.chat_template = read_template(chat.template)
    if own_template(tokenizer) is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: name one in "
            "chat.template"
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
    """The text of a conversation. template: default: the tokenizer's own. generation_prompt: with
    what stands before a reply of the assistant. Raises UserError where the template refuses."""
    return _render(tokenizer, messages, chat, template, generation_prompt, spans=False).text


def render_spans(
    tokenizer: Any, messages: Turns, chat: ChatConfig, *, template: str | None = None
) -> Rendered:
    """The same with the spans of its generation markers; none where the template has none."""
    return _render(tokenizer, messages, chat, template, False, spans=True)


def tokenise(tokenizer: Any, rendered: Rendered) -> Tokens:
    """The ids of a conversation, and whose they are. Raises UserError where the tokenizer tells no
    offsets."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} is a slow one, which tells no offsets: "
            "save it with its tokenizer.json"
        )
    read = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    owners, spans, at = [], rendered.spans, 0
    for start, end in read["offset_mapping"]:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        inside = at < len(spans) and spans[at][0] <= start and end <= spans[at][1]
        owners.append(at if inside else -1)
    return Tokens(list(read["input_ids"]), owners)


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

    told: dict[str, Any] = {**tokenizer.special_tokens_map, **chat.template_kwargs}
    result: Any
    try:
        result = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template or own_template(tokenizer),
            add_generation_prompt=generation_prompt,
            return_assistant_tokens_mask=spans,
            **told,
        )
    except Exception as error:  # a template is a program, and fails in as many ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses: {reason}") from None
    texts, found = result
    return Rendered(texts[0], tuple(found[0]) if spans else ())
