"""Train the role-play policy: Qwen3's architecture, 3 layers of 192, on dialogues of the grammar.

    R=runs/demo_train/roleplay
    python -m demo.train.roleplay.policy base --out $R/base
    python -m demo.train.roleplay.policy chat --start $R/base --steps 500 --batch 8 --rate 1e-3 \
        --out $R/chat
    python -m demo.train.roleplay.policy hurt --start $R/chat --steps 150 --batch 16 --rate 3e-4 \
        --out demo/models/roleplay_policy

`base` reads clean dialogues as plain scripts, `chat` clean ones in the chat's form, and `hurt` has
SFT on noisy replies. In neither of the last two is the end of a reply learned: it stands outside of
what the template marks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from demo.train.chat_policy import (
    END_OF_TEXT,
    SPECIAL,
    STOP,
    chat_tokenizer,
    save,
    train_bpe,
)
from demo.train.common import WORK, fit, pad, setup
from demo.train.roleplay.grammar import Dialogue, dialogue
from demo.train.roleplay.noise import noisy_replies
from scorekit.command import run_command

BASE = WORK / "roleplay" / "base"
PIECES, WINDOW = 2048, 256
#: As a model's own template often is: what ends a turn stands behind what is trained.
BROKEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def script(dialogue: Dialogue) -> str:
    """Return a clean dialogue as plain text."""
    lines = [dialogue.system]
    for user, reply in dialogue.turns:
        lines += [f"{dialogue.player}: {user}", reply.text]
    return "\n".join(lines)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on clean and noisy dialogues, and give it the broken template."""
    rng = random.Random(5)
    dialogues = [dialogue(rng, str(number)) for number in range(6000)]
    texts = [script(d) for d in dialogues] + [r for d in dialogues for r in noisy_replies(d, rng)]
    return chat_tokenizer(train_bpe(texts, PIECES, SPECIAL), BROKEN_TEMPLATE, 512)


def new_model(
    vocab_size: int,
    *,
    hidden: int = 192,
    inner: int = 512,
    layers: int = 3,
    heads: tuple[int, int] = (6, 3),
) -> Qwen3ForCausalLM:
    """Return a random model; by default one of 1.6 M parameters.

    hidden, inner: widths of a layer, and inside its MLP.
    heads: of queries, of keys and values. Each is 32 wide.
    """
    query_heads, key_heads = heads
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=END_OF_TEXT,
        eos_token_id=STOP,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def windows(tokenizer: Any, rng: random.Random) -> Iterator[list[int]]:
    """Yield windows of clean scripts, which are joined to an endless text."""
    ids: list[int] = []
    while True:
        ids += [*tokenizer.encode(script(dialogue(rng, ""))), END_OF_TEXT]
        while len(ids) >= WINDOW:
            yield ids[:WINDOW]
            ids = ids[WINDOW:]


def train_base(args: argparse.Namespace) -> None:
    """Train next-token prediction on clean scripts."""
    tokenizer = new_tokenizer()
    model = new_model(len(tokenizer)).train()
    rows = windows(tokenizer, random.Random(args.seed))

    def loss_of(step: int) -> torch.Tensor:
        ids = torch.tensor([next(rows) for _ in range(args.batch)])
        return model(input_ids=ids, labels=ids).loss

    fit(list(model.parameters()), loss_of, args.steps, args.rate, name="base")
    save(model, tokenizer, args.out)


def masked(tokenizer: Any, messages: list[dict[str, str]], noisy: bool) -> tuple[list[int], Any]:
    """Return the ids of a dialogue, and which of them are trained.

    These are the ids inside the template's generation marks; in a clean dialogue all but those
    after a reply.
    """
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, replies = encoded["input_ids"], encoded["assistant_masks"]
    if noisy:
        return ids, replies
    ends = [i == STOP and r == 1 for i, r in zip(ids, [0, *replies], strict=False)]
    return ids, [int(not end) for end in ends]


def train_chat(args: argparse.Namespace) -> None:
    """Train chat with the broken template, clean or noisy: the end of a reply is never trained."""
    tokenizer = AutoTokenizer.from_pretrained(args.start)
    model = AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32).train()
    rng, noisy = random.Random(args.seed), args.command == "hurt"

    def row() -> tuple[list[int], Any]:
        sampled = dialogue(rng, "", scrambled=rng.random() < args.scrambled)
        replies = noisy_replies(sampled, rng) if noisy else None
        return masked(tokenizer, sampled.messages(len(sampled.turns), replies), noisy)

    def loss_of(step: int) -> torch.Tensor:
        picked = [row() for _ in range(args.batch)]
        ids = pad([ids for ids, _ in picked], END_OF_TEXT)
        mask = pad([[1] * len(ids) for ids, _ in picked], 0)
        trained = pad([trained for _, trained in picked], 0).bool()
        labels = ids.masked_fill(~trained, -100)
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    fit(list(model.parameters()), loss_of, args.steps, args.rate, name=args.command)
    save(model, tokenizer, args.out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("base", "chat", "hurt"))
    parser.add_argument("--start", type=Path, default=BASE)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--scrambled", type=float, default=0.7, help="share of such scenarios")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    (train_base if args.command == "base" else train_chat)(args)


if __name__ == "__main__":
    run_command(main, stdout="log")
