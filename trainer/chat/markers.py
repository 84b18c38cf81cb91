"""Generation markers: a template that has them, made of one that has none or wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
#: The whole template becomes a macro. What stands between the text up to a turn, with the
#: generation prompt, and the text with that turn is what the assistant writes there. `{%+` and the
#: line end keep the spaces of the template as they are at the ends of a file.
_MARKED = """\
{#- The text is that of the template within the macro, character for character. Around it: each
    turn of the assistant, found as what the template adds to the generation prompt, is marked for
    the training of assistant turns only. -#}
{%%- macro chat_text(messages, add_generation_prompt) %%}
%s{%%+ endmacro %%}
{%%- set whole = chat_text(messages, add_generation_prompt) %%}
{%%- set done = namespace(place=0) %%}
{%%- for message in messages %%}
    {%%- if message.role == 'assistant' and not loop.first %%}
        {%%- set prompt = chat_text(messages[:loop.index0], true) %%}
        {%%- set turn = chat_text(messages[:loop.index], false).rstrip() %%}
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
    """A template with markers. how: where they come from, for eyes."""

    template: str
    how: str


def has_markers(template: str) -> bool:
    """Whether a template marks what the assistant writes, also in the forms that trim spaces."""
    return _BEGIN.search(_without_comments(template)) is not None


def _without_comments(template: str) -> str:
    kept, at = [], 0
    while 0 <= (begin := template.find("{#", at)) < (end := template.find("#}", begin)):
        kept.append(template[at:begin])
        at = end + 2
    return "".join([*kept, template[at:]])


def without_markers(template: str) -> str:
    """The same text with no markers: each becomes a condition that holds, with the same trimming of
    the spaces around it."""
    return _END.sub(r"{%\1 endif \2%}", _BEGIN.sub(r"{%\1 if true \2%}", template))


def marked(template: str) -> str:
    """A template that renders the same text, with markers around every turn of the assistant that
    begins behind its generation prompt and is the same with and without the turns after it."""
    return _MARKED % without_markers(template.removesuffix("\n"))  # Jinja drops a last line end


def candidates(tokenizer: Any, template: str) -> Iterator[MarkedTemplate]:
    """Templates with markers for one that has none, the most readable first: what TRL keeps for
    this very text, and ours, which works for any. Whether they are right is to be checked."""
    from trl.chat_template_utils import get_training_chat_template

    held = copy(tokenizer)
    held.chat_template = template
    try:
        known = get_training_chat_template(held)
    except Exception:  # it does not know this text, or its probes with tools are refused
        known = None
    if known is not None:
        yield MarkedTemplate(known, "put in as TRL does for this template")
    yield MarkedTemplate(marked(template), "put in around what follows each generation prompt")
