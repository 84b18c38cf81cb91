"""Tokenizers and policies made in a second, for the trainer's tests."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.translation.data import Example
from trainer.translation.rollouts import TranslationRollout

CORPUS = [
    "Open the file and save it.",
    "The house is red and big.",
    "파일을 열고 저장하십시오.",
    "이 메시지를 삭제하시겠습니까?",
    "그 집은 빨갛고 큽니다.",
    "設定を保存します。 你好，世界。",
] * 4


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (GPT-2, Qwen), which splits a rare character into several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


@cache
def byte_fallback_tokenizer(drops_first_space: bool = True) -> PreTrainedTokenizerFast:
    """Train a sentencepiece model with byte fallback.

    drops_first_space: True has Llama's form, False Gemma's, which keeps the first space.
    """
    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=f"{folder}/sp",
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/sp.model")
    names = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [
        (name[:cut], name[cut:])
        for name in names
        for cut in range(1, len(name))
        if not name.startswith("<") and name[:cut] in vocab and name[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    prepend = [normalizers.Prepend("▁")] if drops_first_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if drops_first_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
    )


def letter_tokenizer(letters: str = "abcdefgh") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter; the prompt is the source and a `>`."""
    vocab = {"<pad>": 0, "</s>": 1, ">": 2} | {c: i for i, c in enumerate(letters, 3)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = "{{ messages[0]['content'] + '>' }}"
    return wrapped


def tiny_llama(tokenizer: Any, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a random Llama of some 30,000 parameters, in eval mode."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    } | changes
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def save_policy(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    """Write a tiny policy as a Hugging Face folder."""
    tiny_llama(tokenizer, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def example(src: str, id: str = "e", ref: str | None = None) -> Example:
    """Return an English-Korean example."""
    return Example(id, src, "English", "Korean", "en-US", "ko-KR", ref)


def write_examples(path: Path, sources: Sequence[str], ref: str | None = None) -> Path:
    """Write a JSONL file of examples."""
    rows = [
        {"id": i, "src_text": src, "src_lang": "English", "tgt_lang": "Korean", "ref_text": ref}
        for i, src in enumerate(sources)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rollout(
    prompt: Sequence[int], completion: Sequence[int], text: str = "", **fields: Any
) -> TranslationRollout:
    """Return a rollout made by hand."""
    values: dict[str, Any] = {
        "example_id": "e",
        "group": 0,
        "src_text": "source",
        "prompt_text": "",
        "prompt_input_ids": list(prompt),
        "completion_text": text,
        "completion_token_ids": list(completion),
        "token_char_offsets": [(0, 0)] * len(completion),
        "finish_reason": "eos",
    } | fields
    return TranslationRollout(**values)
