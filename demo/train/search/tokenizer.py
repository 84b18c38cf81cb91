"""Byte-level tokenizer of the searcher: words, numbers by two digits, and a token for each tag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from demo.train.chat_policy import SPECIAL, byte_level, chat_tokenizer, train_bpe
from trainer.search.rollout.actions import BBOX, COMPLETE, SEARCH, THINK

TAGS: Final = [f"<{slash}{tag}>" for tag in (THINK, SEARCH, BBOX, COMPLETE) for slash in ("", "/")]
PIECES = 1536
#: Earlier turns stay as they were, and what ends a turn is learned.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def new_tokenizer(texts: Iterable[str], window: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on these texts; no text has unknown tokens.

    window: the number of ids that its model reads.
    """
    # Numbers by two digits: years are two pieces, boxes are few, and there are no thousand more.
    numbers = pre_tokenizers.Split(Regex(r" ?\d{1,2}"), "isolated")
    split = pre_tokenizers.Sequence([numbers, byte_level()])
    return chat_tokenizer(train_bpe(texts, PIECES, SPECIAL + TAGS, split), TEMPLATE, window)
