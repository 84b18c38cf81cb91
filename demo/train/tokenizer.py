"""One sentencepiece unigram vocabulary for all three models, each with its own marks.

    python -m demo.train.tokenizer

Writes runs/demo_train/tokenizer/{unigram.model,policy,metricx,xcomet}. The text is not
normalised, and characters outside the vocabulary become bytes, so decode(encode(x)) == x.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from demo.train.data import DATA, read_jsonl
from scorekit.command import run_command

WORK = Path("runs/demo_train")
VOCAB_SIZE = 4000
PAD, EOS, UNK, BOS, MASK, SRC, TGT, SCORE = range(8)
CONTROL = ["<pad>", "</s>", "<unk>", "<s>", "<mask>", "<en>", "<ko>", "<score>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<en>' + message['content'] + '<ko>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)


def train_unigram(folder: Path) -> Path:
    """Train sentencepiece on the training texts, both languages together."""
    texts = []
    for name in ("sft", "rl_prompts", "pydocs"):
        for row in read_jsonl(DATA / f"{name}.jsonl"):
            texts += [row["src_text"], row["ref_text"]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "unigram"),
        vocab_size=VOCAB_SIZE,
        model_type="unigram",
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=BOS,
        pad_piece="<pad>",
        control_symbols=CONTROL[4:],
        num_threads=1,
    )
    return folder / "unigram.model"


def backend(model: Path) -> Tokenizer:
    """Return the sentencepiece model as a `tokenizers` pipeline."""
    sentencepiece_model = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocab = []
    for index in range(sentencepiece_model.get_piece_size()):
        control = index < len(CONTROL)  # must never match inside a text
        vocab.append(
            (
                sentencepiece_model.id_to_piece(index),
                -100.0 if control else sentencepiece_model.get_score(index),
            )
        )
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=UNK, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def save_all(model: Path, folder: Path) -> None:
    """Save the vocabulary with the marks of Llama, T5 and XLM-RoBERTa.

    Not in their classes: transformers 5 makes these anew, with rules of its own.
    """
    policy = PreTrainedTokenizerFast(
        tokenizer_object=backend(model),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<en>", "<ko>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=256,
    )
    policy.chat_template = CHAT_TEMPLATE
    policy.save_pretrained(folder / "policy")
    inner = backend(model)
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=1536,
    ).save_pretrained(folder / "metricx")
    inner = backend(model)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=512,
    ).save_pretrained(folder / "xcomet")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=WORK / "tokenizer")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save_all(train_unigram(args.out), args.out)


if __name__ == "__main__":
    run_command(main, stdout="log")
