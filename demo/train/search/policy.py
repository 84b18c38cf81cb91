"""Cold-start the searcher of the search demo on scripted episodes.

    python -m demo.train.search.policy --out runs/demo_train/search/first

`--start` goes on from a policy; demo/train/README.md has the three rounds of the committed one.
First it learns to take a query out of a question, on questions that mean nothing; then episodes, on
the demo's own index. It reads no question about the documents that are held out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo.common import ROOT
from demo.search.make_corpus import TRAIN
from demo.search.reading import Reader
from demo.train.chat_policy import END_OF_TEXT, STOP, save
from demo.train.common import fit, pad, setup
from demo.train.search.copying import new_model
from demo.train.search.episodes import Row, messages_of, rows_of, scripted, served_corpus
from demo.train.search.questions import Questions
from demo.train.search.scripts import any_style, search_turn
from demo.train.search.tokenizer import new_tokenizer
from scorekit.command import run_command
from scorekit.config import load_config
from trainer.search.config import EpisodeConfig, SearchConfig
from trainer.search.records import Trajectory

CONFIG = ROOT / "configs/search/demo_phase1.yaml"
COMMON = ROOT / "demo/data/sft.jsonl"
WINDOW = 1024
#: Of the questions that it reads: real ones, about the documents of the training questions.
REAL = 0.2
#: Queries of a question in a row of the first stage.
QUERIES = 3


def questions_of(path: Path) -> list[str]:
    """Return the questions of a file of the demo."""
    return [json.loads(line)["question"] for line in path.read_text("utf-8").splitlines()]


def common_texts(path: Path) -> list[str]:
    """Return both sides of the translation demo's pairs."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row[side] for row in rows for side in ("src_text", "ref_text")]


def query_row(question: str, tokenizer: Any, rng: random.Random) -> Row:
    """Return the queries of a question, one turn after the other, with as little as possible
    between them.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    row = ids(f"<|im_start|>user\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n")
    between = ids("\n<|im_start|>user\n4 turns left.<|im_end|>\n<|im_start|>assistant\n")
    is_trained = [False] * len(row)
    for number in range(QUERIES):
        turn = [*ids(search_turn(question, any_style(rng), rng)), STOP]
        row += (between if number else []) + turn
        is_trained += [False] * (len(between) if number else 0) + [True] * len(turn)
    return row, is_trained


def loss_of(model: Any, rows: list[Row], num_tokens: float | None = None) -> Tensor:
    """Return the next-token loss of the trained tokens. Padding is on the right, where no token
    looks.

    num_tokens: what the sum is divided by; None: the number of these tokens. A batch of short
    episodes must not weigh as much as one of long ones: what ends an episode early would count
    several times.
    """
    ids = pad([row for row, _ in rows], END_OF_TEXT)  # [B, T]
    trained_mask = pad([[int(mark) for mark in marks] for _, marks in rows], 0).bool()[:, 1:]
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][trained_mask]  # [N, width]
    losses = cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][trained_mask], reduction="sum")
    return losses / (num_tokens or trained_mask.sum())


def tokenizer_texts(
    episodes: list[Trajectory], cfg: EpisodeConfig, corpus: list[str], draw: Callable[[], str]
) -> list[str]:
    """Return the texts of the episodes, the corpus, and questions."""
    episode_texts = [message.text for episode in episodes for message in messages_of(episode, cfg)]
    roles = ["system\nuser\nassistant"] * 500
    return episode_texts + corpus + roles + [draw() for _ in range(3000)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, help="go on from this policy")
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--query-steps", type=int, default=1100)
    parser.add_argument("--episode-steps", type=int, default=350)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    rng = random.Random(args.seed)
    cfg = load_config(SearchConfig, CONFIG).episode
    corpus = [text for page in Reader().pages.values() for text, _ in page.lines]
    real, generated = questions_of(TRAIN), Questions(corpus, common_texts(COMMON), rng)

    def question() -> str:
        return rng.choice(real) if rng.random() < REAL else generated.draw()

    with served_corpus() as retriever:
        sampled_questions = [question() for _ in range(args.episodes)]
        episodes = scripted(sampled_questions, retriever, cfg, args.seed)
    if args.start is None:
        tokenizer = new_tokenizer(tokenizer_texts(episodes, cfg, corpus, question), WINDOW)
        model = new_model(len(tokenizer), WINDOW)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start)
        model = AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    model.train()
    rows = sorted(rows_of(episodes, cfg, tokenizer), key=lambda row: len(row[0]))
    batch_tokens = 16 * fmean(sum(is_trained) for _, is_trained in rows)

    def query_loss(step: int) -> Tensor:
        return loss_of(model, [query_row(question(), tokenizer, rng) for _ in range(32)])

    def episode_loss(step: int) -> Tensor:
        first = rng.randrange(len(rows) - 16)  # of like lengths
        return loss_of(model, rows[first : first + 16], batch_tokens)

    weights = list(model.parameters())
    fit(weights, query_loss, args.query_steps, args.rate, name="queries")
    fit(weights, episode_loss, args.episode_steps, args.rate / 2, name="episodes")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    run_command(main, stdout="log")
