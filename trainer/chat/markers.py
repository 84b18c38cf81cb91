"""Generation markers: add them to a template that has none or wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
#: The full template becomes a macro. The assistant's turn is the text between the prompt (with the
#: generation prompt) and the text with that turn. `{%+` and the line end preserve the spaces of the
#: template at the ends of a file.
_MARKED = """\
{#- The text is that of the template within the macro, character for character. Around it: each
    turn of the assistant, found as what the template adds to the generation prompt, is marked for
    the training of assistant turns only. An EOS that ends the whole text behind the end of its
    last turn is not part of that turn. -#}
{%%- macro chat_text(messages, add_generation_prompt) %%}
%s{%%+ endmacro %%}
{%%- set whole = chat_text(messages, add_generation_prompt) %%}
{%%- set done = namespace(place=0) %%}
{%%- for message in messages %%}
    {%%- if message.role == 'assistant' and not loop.first %%}
        {%%- set prompt = chat_text(messages[:loop.index0], true) %%}
        {%%- set turn = chat_text(messages[:loop.index], false).rstrip() %%}
        {%%- if eos_token and turn.endswith(eos_token)
                and not chat_text(messages[:loop.index], true).startswith(turn) %%}
            {%%- set bare = turn[:turn|length - eos_token|length].rstrip() %%}
            {%%- if not bare.endswith((message.content or '')|string|trim) %%}
                {%%- set turn = bare %%}
            {%%- endif %%}
        {%%- endif %%}
        {%%- if whole.startswith(prompt) and whole.startswith(turn) %%}
            {{- whole[done.place:prompt|length] }}
            {%%- generation %%}
                {{- whole[prompt|length:turn|length] }}
            {%%- endgeneration %%}
            {%%- set done.place = turn|length %%}
        {%%- endif %%}
    {%%- endif %%}
{%%- endfor %%}
{{- whole[done.place:] }}"""


class MarkedTemplate(NamedTuple):
    """A template with markers.

    origin: the source of the markers, for messages.
    """

    template: str
    origin: str


def has_markers(template: str) -> bool:
    """Return whether a template marks the assistant's text, also in the forms that trim spaces."""
    return _BEGIN.search(_without_comments(template)) is not None


def _without_comments(template: str) -> str:
    parts, position = [], 0
    while 0 <= (begin := template.find("{#", position)) < (end := template.find("#}", begin)):
        parts.append(template[position:begin])
        position = end + 2
    return "".join([*parts, template[position:]])


def without_markers(template: str) -> str:
    """Return the template without markers.

    Each becomes a condition that is true, with the same trimming of the spaces around it.
    """
    return _END.sub(r"{%\1 endif \2%}", _BEGIN.sub(r"{%\1 if true \2%}", template))


def marked(template: str) -> str:
    """Return a template that renders the same text, with markers around the assistant's turns.

    A turn is marked if it begins after its generation prompt, and later turns do not change it.
    """
    return _MARKED % without_markers(template.removesuffix("\n"))  # Jinja drops a last line end


def candidates(tokenizer: Any, template: str) -> Iterator[MarkedTemplate]:
    """Yield templates with markers for one without, the most readable first.

    They are TRL's for this exact text, if there is one, and ours for any. The caller checks them.
    """
    from trl.chat_template_utils import get_training_chat_template

    tokenizer_copy = copy(tokenizer)
    tokenizer_copy.chat_template = template
    try:
        trl_template = get_training_chat_template(tokenizer_copy)
    except Exception:  # TRL does not have this text, or its probes with tools are refused
        trl_template = None
    if trl_template is not None:
        yield MarkedTemplate(trl_template, "added as TRL does for this template")
    yield MarkedTemplate(marked(template), "added around the text after each generation prompt")
