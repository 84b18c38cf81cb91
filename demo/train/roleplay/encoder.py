"""Train the sentence encoder: XLM-R's architecture, 2 layers of 128, on pairs of the grammar.

    python -m demo.train.roleplay.encoder --out demo/models/encoder

Pairs that belong together: a turn and a reply to it, two wordings of a turn, two wordings of a
reply (other narration, other level). All other texts of a batch are false. The folder has the form
of sentence-transformers: Transformer, Pooling (CLS), Normalize.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses, modules
from tokenizers import processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from demo.train.chat_policy import train_bpe
from demo.train.common import setup
from demo.train.roleplay.grammar import OTHER, names, tables, words
from demo.train.roleplay.korean import render
from scorekit.command import run_command
from scorekit.files import allow_readers

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
PIECES, WIDTH, LAYERS, LONGEST = 3000, 128, 2, 256


def pairs(rng: random.Random, count: int, held_out: bool = False) -> dict[str, list[str]]:
    """Return two columns of texts that belong together, row by row."""
    scenarios, acts, book = tables()
    scenes = [s for s in scenarios if s.get("held_out", False) == held_out]
    rows: dict[str, list[str]] = {"anchor": [], "positive": []}
    for number in range(count):
        entry, scene = rng.choice(book["exchanges"]), rng.choice(scenes)
        character, player = rng.sample(names(held_out), 2)
        scene_with_names = scene | {"c": character, "p": player}
        slots = words(rng, entry["ask"] + entry["say"], scene_with_names)

        def turn(entry: dict[str, Any] = entry, slots: dict[str, str] = slots) -> str:
            return render(rng.choice(entry["ask"]), rng.choice(list(OTHER)), slots)

        def reply(
            entry: dict[str, Any] = entry,
            slots: dict[str, str] = slots,
            scene_with_names: Any = scene_with_names,
        ) -> str:
            slots = slots | {k: rng.choice(scene_with_names[f"{k}s"]) for k in ("spot", "prop")}
            level = rng.choice(list(OTHER))
            dialogue_text = render(rng.choice(entry["say"]), level, slots)
            return f'{render(rng.choice(acts[entry["mood"]]), level, slots)}\n"{dialogue_text}"'

        text_pairs = ((turn(), reply()), (reply(), reply()), (turn(), turn()))[
            (0, 0, 1, 2)[number % 4]
        ]
        rows["anchor"].append(text_pairs[0])
        rows["positive"].append(text_pairs[1])
    return rows


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer with byte-level tokens and XLM-R's special tokens."""
    backend = train_bpe(texts, PIECES, SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    named = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **dict(zip(named, SPECIAL, strict=True)),
    )


def new_model(texts: list[str]) -> SentenceTransformer:
    """Return an untrained encoder, its vocabulary learned from `texts`."""
    tokenizer = tokenizer_of(texts)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LONGEST + 2,
        type_vocab_size=1,
        initializer_range=0.1,  # at 0.02 the first position is the same for all, and stays so
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        XLMRobertaModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        body = modules.Transformer(folder, max_seq_length=LONGEST)
    return SentenceTransformer(
        modules=[body, modules.Pooling(WIDTH, pooling_mode="cls"), modules.Normalize()],
        device="cpu",
    )


def compute_stats(model: SentenceTransformer, count: int = 400) -> dict[str, float]:
    """Measure the model on held-out pairs.

    true, shuffled: mean cosine of true pairs and of shuffled ones. nearest: the share of texts
    whose true partner is the nearest of all.
    """
    rows = pairs(random.Random(99), count, held_out=True)
    left, right = (model.encode(rows[k], convert_to_tensor=True) for k in ("anchor", "positive"))
    cosines = left @ right.T
    true = cosines.diagonal()
    false = cosines[~torch.eye(count, dtype=torch.bool)]
    first = (cosines.argmax(1) == torch.arange(count)).float().mean()
    stats = {"true": true.mean(), "shuffled": false.mean(), "nearest": first}
    return {name: round(value.item(), 3) for name, value in stats.items()}


def train(steps: int, batch: int, rate: float, count: int, out: Path, seed: int) -> None:
    """Train, measure on held-out scenarios and names, save."""
    rows = pairs(random.Random(seed), count)
    model = new_model([text for column in rows.values() for text in column])
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                learning_rate=rate,
                warmup_steps=steps // 10,
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                seed=seed,
                use_cpu=True,
                bf16=True,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(rows),
            loss=losses.MultipleNegativesRankingLoss(model, scale=20.0),
        )
        trainer.train()
    print(compute_stats(model), sum(p.numel() for p in model.parameters()), "parameters")
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(str(out), create_model_card=False)
    allow_readers(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("demo/models/encoder"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    train(args.steps, args.batch, args.rate, args.pairs, args.out, args.seed)


if __name__ == "__main__":
    run_command(main, stdout="log")
