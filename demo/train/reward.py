"""Make demo/models/reward: the policy's first two layers, which prefer a row's own translation.

python -m demo.train.reward

It learns by pairs (Bradley-Terry): the conversation with the row's reference against the same with
a translation of another row, or with the row's own cut short or untranslated.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from scorekit.command import run_command

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = ROOT / "models/policy", ROOT / "models/reward"
LAYERS, STEPS, PAIRS, LEARNING_RATE = 2, 250, 16, 5e-4


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of the demo."""
    lines = (ROOT / "data" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def worse(row: dict[str, Any], rows_of_all: list[dict[str, Any]], chance: random.Random) -> str:
    """Return a translation that is worse than the row's reference."""
    kind = chance.random()
    if kind < 0.15:
        return str(row["src_text"])
    if kind < 0.3 and len(row["ref_text"]) > 8:
        return str(row["ref_text"])[: len(row["ref_text"]) // 2]
    return str(chance.choice(rows_of_all)["ref_text"])


def main() -> None:
    """Train and write the model; print how often it prefers the reference of held-out rows."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    chance = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    config = AutoConfig.from_pretrained(SOURCE, num_labels=1, num_hidden_layers=LAYERS)
    config.id2label, config.label2id = {0: "reward"}, {"reward": 0}
    model = AutoModelForSequenceClassification.from_pretrained(
        SOURCE, config=config, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    def scores(pairs: list[tuple[str, str]]) -> torch.Tensor:
        """Return the outputs [B] of (source, translation)."""
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": src}, {"role": "assistant", "content": mt}],
                tokenize=False,
            )
            for src, mt in pairs
        ]
        inputs = tokenizer(
            texts, add_special_tokens=False, padding=True, truncation=True, max_length=96,
            return_tensors="pt", return_token_type_ids=False,
        )  # fmt: skip
        return model(**inputs).logits[:, 0]

    training, held_out = rows("sft.jsonl"), rows("heldout.jsonl")[:400]
    for step in range(STEPS):
        batch = chance.sample(training, PAIRS)
        good = [(row["src_text"], row["ref_text"]) for row in batch]
        bad = [(row["src_text"], worse(row, training, chance)) for row in batch]
        both = scores(good + bad)
        loss = -torch.nn.functional.logsigmoid(both[:PAIRS] - both[PAIRS:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), file=sys.stderr, flush=True)
    model.train(False)
    with torch.inference_mode():
        good = [(row["src_text"], row["ref_text"]) for row in held_out]
        bad = [(row["src_text"], worse(row, held_out, chance)) for row in held_out]
        preferred = (scores(good) > scores(bad)).float().mean().item()
    print(f"prefers the reference in {preferred:.3f} of {len(held_out)} held-out rows")
    model.to(torch.bfloat16).save_pretrained(TARGET)
    tokenizer.save_pretrained(TARGET)


if __name__ == "__main__":
    run_command(main, stdout="log")
