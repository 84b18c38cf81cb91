"""Reward models of random weights in the shapes of four families, made on the spot.

Each has the traps of its family: a chat template that writes the beginning-of-sequence token, which
the tokenizer would add once more; one that adds a system turn, or that refuses one; a padding token
that the model does not know, or that is the end of a turn; token types. Weights are so large that
texts differ clearly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "qwen", "gemma", "deberta"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen", "gemma", "deberta")

_TEXTS = [
    "The house is red. Is it cheap, and who lives there? 12 people, they say: a long story.",
    "Open the file, save it, and close the window; then press the key once more.",
    "집은 빨간색이다. 파일을 저장하고 창을 닫습니다. 다시 한 번 누르세요.",
    "user assistant system model",
]
#: Llama 3 writes its first token itself.
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|turn|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|turn|>{% endif %}"
)
#: Qwen 2.5 begins with a system turn of its own, unless there is one.
_QWEN = (
    "{% if messages[0].role != 'system' %}<|start|>system\nYou are a helpful assistant.<|eot|>\n"
    "{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
)
#: Gemma has no system turn, and calls the assistant a model.
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for m in messages %}<|start|>{{ 'model' if m.role == 'assistant' "
    "else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
)
TEMPLATES: dict[str, str | None] = {
    "llama": _LLAMA,
    "qwen": _QWEN,
    "gemma": _GEMMA,
    "deberta": None,
}


def make_reward_model(
    folder: Path,
    family: Family = "llama",
    *,
    labels: Sequence[str] = ("reward",),
    padding_side: str = "right",
    pad: Literal["own", "end", "none", "unknown"] = "own",
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    max_length: int = 128,
    template: str | None = "family",
) -> Path:
    """Write a model and its tokenizer, as transformers saves them; return `folder`.

    pad: `own`, a token of its own; `end`, that of the end of a turn; `none`, the model's config has
    none; `unknown`, nor has the model a row for that of the tokenizer.
    template: `family`, that of the family; None: no chat template.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family, padding_side, pad, max_length)
    tokenizer.chat_template = TEMPLATES[family] if template == "family" else template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = _config(family, tokenizer, hidden, layers, max_length)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    pads = {"own": tokenizer.pad_token_id, "end": tokenizer.pad_token_id}
    config.pad_token_id = pads.get(pad)
    model = AutoModelForSequenceClassification.from_config(config)
    head: Any = model.score if hasattr(model, "score") else model.classifier
    torch.nn.init.normal_(head.weight)
    model.save_pretrained(folder)
    return folder


def reference(
    folder: Path, messages: Any = None, text: str | None = None, pair: str | None = None, **cut: Any
) -> list[float]:
    """Return what transformers' own forward of one sample gives: the outputs by label."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(str(folder), local_files_only=True)
    model.train(False)
    if messages is not None:
        inputs: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_tensors="pt", return_dict=True, **cut
        )
    else:
        inputs = tokenizer(text, pair, return_tensors="pt", **cut)
    with torch.inference_mode():
        logits: list[float] = model(**inputs).logits[0].tolist()
    return logits


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of a model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tokenizer(family: Family, padding_side: str, pad: str, max_length: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    is_encoder = family == "deberta"
    begin, end = ("[CLS]", "[SEP]") if is_encoder else ("<bos>", "<eos>")
    special = [begin, end, "<|start|>", "<|turn|>", "<|eot|>"]
    special += ["<pad>"] if pad in ("own", "none") else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if is_encoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}",
            pair=f"{begin} $A {end} $B:1 {end}:1",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
        )
    elif family != "qwen":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin}:1 $B:1",
            special_tokens=[(begin, tokenizer.token_to_id(begin))],
        )
    names: dict[str, Any] = {"bos_token": begin, "eos_token": end}
    if is_encoder:
        names |= {"cls_token": begin, "sep_token": end}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token={"end": "<|eot|>", "unknown": "<|added pad|>"}.get(pad, "<pad>"),
        padding_side=padding_side,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"][
            :: 1 if is_encoder else 2
        ],
        **names,
    )


def _config(family: Family, tokenizer: Any, hidden: int, layers: int, max_length: int) -> Any:
    from transformers import DebertaV2Config, Gemma2Config, LlamaConfig, Qwen2Config

    # What was added after the training has no row.
    rows = tokenizer.vocab_size - ("<|added pad|>" in tokenizer.get_vocab())
    shape: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": max_length,
        "initializer_range": 0.3 if hidden < 128 else 0.02,
    }
    if family == "deberta":
        shape |= {
            "type_vocab_size": 2,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_buckets": 16,
            "max_relative_positions": -1,
            "pooler_hidden_size": hidden,
        }
        return DebertaV2Config(**shape)
    shape |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    if family == "gemma":
        return Gemma2Config(**shape, head_dim=hidden // 4, sliding_window=16)
    return (LlamaConfig if family == "llama" else Qwen2Config)(**shape)
