"""Byte-level tokenizer of the searcher: words, numbers by two digits, and a token for each tag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.search.actions import BBOX, COMPLETE, SEARCH, THINK

END_OF_TEXT, STOP = 0, 2
SPECIAL: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
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
    tokenizer = Tokenizer(models.BPE())
    # Numbers by two digits: years are two pieces, boxes are few, and there are no thousand more.
    numbers = pre_tokenizers.Split(Regex(r" ?\d{1,2}"), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([numbers, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=SPECIAL + TAGS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=window,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    fast_tokenizer.chat_template = TEMPLATE
    return fast_tokenizer
