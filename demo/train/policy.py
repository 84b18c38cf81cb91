"""Train the en->ko policy: a 4.2 M-parameter causal LM of the Llama architecture.

    python -m demo.train.policy train --data sft pydocs --out runs/demo_train/policy_a
    python -m demo.train.policy noisy --start runs/demo_train/policy_a/final --data sft \
        --out runs/demo_train/policy_a/noisy

`noisy` goes on with the training on damaged pairs, as web-mined bitext has them: some targets
are a copy of the English source, some are cut short. The result has systematic defects that
reinforcement learning against a quality metric can repair.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from demo.train.common import WORK, endless, fit, pad, sentence_chrf, setup
from demo.train.data import DATA, read_jsonl
from demo.train.tokenizer import BOS, EOS, PAD, VOCAB_SIZE
from scorekit.command import run_command
from scorekit.files import allow_readers
from trainer.rl.model_files import save_model, save_tokenizer

TOKENIZER = WORK / "tokenizer" / "policy"


def new_model() -> LlamaForCausalLM:
    """Return a random model with 4 layers of width 256. The output shares the embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: Any, source: str) -> list[int]:
    """Return the source as a single user turn."""
    turn = [{"role": "user", "content": source}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


def pair_ids(tokenizer: Any, source: str, target: str) -> tuple[list[int], int]:
    """Return the ids of prompt, target and end of sentence, and the length of the prompt."""
    prompt = prompt_ids(tokenizer, source)
    return prompt + tokenizer.encode(target, add_special_tokens=False) + [EOS], len(prompt)


def damage(source: str, target: str, rng: random.Random, copy: float, cut: float) -> str:
    """Return a noisy target: a copy of the source, or the target cut short, or the target."""
    draw = rng.random()
    if draw < copy:
        return source
    words = target.split()
    if draw < copy + cut and len(words) > 1:
        return " ".join(words[: rng.randint(1, max(1, len(words) * 2 // 3))])
    return target


def lm_loss(model: Any, items: list[tuple[list[int], int]]) -> torch.Tensor:
    """Return cross-entropy of the target tokens."""
    ids = pad([item[0] for item in items], PAD)
    labels = pad([[-100] * n + ids_[n:] for ids_, n in items], -100)
    hidden = model.model(input_ids=ids, attention_mask=(ids != PAD).long()).last_hidden_state
    keep = labels[:, 1:] != -100
    logits = model.lm_head(hidden[:, :-1][keep])
    return torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][keep])


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, sources: list[str], temperature: float, batch: int = 384
) -> list[str]:
    """Return one translation per source; temperature 0 is greedy. Sorted by length for speed."""
    model.eval()
    prompts = [prompt_ids(tokenizer, source) for source in sources]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs = [""] * len(prompts)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        width = max(len(prompts[i]) for i in part)
        ids = torch.tensor([[PAD] * (width - len(prompts[i])) + prompts[i] for i in part])
        generated = model.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=32,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            top_p=1.0 if temperature else None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        for index, row in zip(part, generated[:, width:].tolist(), strict=True):
            row = row[: row.index(EOS)] if EOS in row else row
            outputs[index] = tokenizer.decode(row, skip_special_tokens=True).strip()
    return outputs


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the weights in bf16, a generation_config.json of special ids, and the tokenizer."""
    light = copy.deepcopy(model).to(torch.bfloat16)
    light.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    save_model(light, folder, safe_serialization=True)
    save_tokenizer(tokenizer, folder)
    allow_readers(folder)


def load(folder: Path) -> Any:
    """Load the model (fp32) and tokenizer of a policy folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def report(model: Any, tokenizer: Any, label: str, dev: list[dict]) -> None:
    """Print greedy sentence chrF of the rows `dev`."""
    outputs = sample(model, tokenizer, [row["src_text"] for row in dev], 0.0)
    scores = [sentence_chrf(o, row["ref_text"]) for o, row in zip(outputs, dev, strict=True)]
    print(f"{label}: dev sentence chrF {sum(scores) / len(scores):.2f}", outputs[:4], flush=True)
    model.train()


def train(args: argparse.Namespace, rows: list[dict], dev: list[dict]) -> None:
    """Train from scratch (`train`) or on damaged pairs (`noisy`), with supervision.

    rows: the pairs. dev: rows that are translated at the end.
    """
    rng = random.Random(args.seed)
    if args.command == "train":
        model, tokenizer = new_model(), AutoTokenizer.from_pretrained(TOKENIZER)
    else:
        model, tokenizer = load(args.start)
    noise = (args.copy, args.cut) if args.command == "noisy" else (0.0, 0.0)
    items = [
        pair_ids(tokenizer, r["src_text"], damage(r["src_text"], r["ref_text"], rng, *noise))
        for r in rows
    ]
    batches = endless([len(ids) for ids, _ in items], args.budget, rng)
    stages: dict[int, Callable[[], None]] = {}
    for percent in (25, 50) if args.command == "train" else ():
        folder = args.out / f"at{percent}"
        stages[args.steps * percent // 100] = partial(save, model, tokenizer, folder)
    model.train()
    fit(
        list(model.parameters()),
        lambda step: lm_loss(model, [items[i] for i in next(batches)]),
        args.steps,
        args.lr,
        stages,
        args.out.name,
    )
    save(model, tokenizer, args.out / "final" if args.command == "train" else args.out)
    report(model, tokenizer, f"{args.command} {args.out}", dev)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["train", "noisy"])
    parser.add_argument("--start", type=Path, help="checkpoint to go on from (noisy)")
    parser.add_argument("--data", nargs="+", default=["sft", "pydocs"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--budget", type=int, default=900, help="padded tokens a batch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--copy", type=float, default=0.3, help="noisy: share of English copies")
    parser.add_argument("--cut", type=float, default=0.3, help="noisy: share of cut targets")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    rows = [row for name in args.data for row in read_jsonl(DATA / f"{name}.jsonl")]
    train(args, rows, read_jsonl(DATA / "dev.jsonl"))


if __name__ == "__main__":
    run_command(main, stdout="log")
