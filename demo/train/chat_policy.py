"""Train a byte-level tokenizer for the small chat policies, and save their folders.

The vocabulary is trained on the demo's own texts: no token is unknown, and spaces are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from scorekit.files import allow_readers
from trainer.rl.model_files import save_model, save_tokenizer

SPECIAL: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, STOP = 0, 2


def byte_level() -> Any:
    """Return the split of a text into words, as bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def train_bpe(
    texts: Iterable[str], vocab_size: int, special: list[str], pre_tokenizer: Any = None
) -> Tokenizer:
    """Train a vocabulary of `vocab_size`, the special tokens first, in their order.

    pre_tokenizer: default: `byte_level`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat_tokenizer(backend: Tokenizer, template: str, window: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template.

    window: the number of ids that its model reads.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=window,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write bf16 weights, tokenizer, and generation settings with the stop token."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=STOP, pad_token_id=END_OF_TEXT
    )
    save_model(model.to(torch.bfloat16), folder)
    save_tokenizer(tokenizer, folder)
    allow_readers(folder)
