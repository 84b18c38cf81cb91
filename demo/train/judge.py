"""Shared parts of the two metric trainings: example sets, prefix-LM masks, losses, dev stats."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch.nn import functional

from demo.train.common import WORK, endless, pad, token_batches
from demo.train.data import DATA, read_jsonl
from demo.train.examples import Example, Labeller, samples, synthetic
from demo.train.tokenizer import EOS, PAD

FIX_WEIGHT = 0.2


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the options of both metric scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("command", choices=["pretrain", "train"])
    parser.add_argument("--start", type=Path, help="state to go on from (a .pt file)")
    parser.add_argument("--out", type=Path, required=True, help="state to write (a .pt file)")
    parser.add_argument("--export", type=Path, help="checkpoint folder to write")
    parser.add_argument("--candidates", type=Path, default=WORK / "candidates")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--budget", type=int, default=1500, help="padded tokens a batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reference-share", type=float, default=0.15)
    parser.add_argument("--inside", type=int, default=3, help="damaged translations a source")
    parser.add_argument("--whole", type=int, default=1, help="whole-text failures a source")
    parser.add_argument("--truth", type=int, default=1, help="true translations a source")
    parser.add_argument(
        "--within",
        type=float,
        default=0.0,
        help="extra weight of the error inside a source (batches by source)",
    )
    parser.add_argument("--skip", nargs="*", default=[], help="candidate files to leave out")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def pretraining_pairs(tokenizer: Any) -> list[Example]:
    """Return true translations of everything but the evaluation splits."""
    labeller = Labeller(tokenizer)
    out = []
    for name in ("sft", "rl_prompts", "pydocs"):
        for row in read_jsonl(DATA / f"{name}.jsonl"):
            src, ids = labeller.ids(row["src_text"]), labeller.ids(row["ref_text"])
            out.append(Example(src, ids, ids, 0.0, [0] * len(ids), [-1] * len(ids), "truth"))
    return out


def training_examples(tokenizer: Any, args: argparse.Namespace) -> list[Example]:
    """Return policy samples of the candidate files, and corruptions of the training pairs."""
    labeller = Labeller(tokenizer)
    files = [p for p in sorted(args.candidates.glob("*.jsonl")) if p.stem not in args.skip]
    rows = [row for name in ("sft", "rl_prompts") for row in read_jsonl(DATA / f"{name}.jsonl")]
    out = samples(labeller, [p for p in files if not p.stem.startswith("dev")])
    sampled = len(out)
    out += synthetic(labeller, rows, args.inside, args.whole, args.truth, args.seed)
    names = [path.stem for path in files]
    print(f"{sampled} samples of {names}, {len(out) - sampled} others", flush=True)
    return out


def batches_of(examples: list[Example], args: argparse.Namespace, extra: int) -> Any:
    """Yield batches of similar length without end.

    With --within, up to six candidates of a source are adjacent, so that they can be compared.
    """
    rng = random.Random(args.seed)
    lengths = [len(e.src) + len(e.mt) + extra for e in examples]
    if not args.within:
        yield from endless(lengths, args.budget, rng)
    while True:
        by_source = defaultdict(list)
        for index in rng.sample(range(len(examples)), len(examples)):
            by_source[tuple(examples[index].src)].append(index)
        groups = [g[i : i + 6] for g in by_source.values() for i in range(0, len(g), 6)]
        sizes = [max(lengths[i] for i in group) * 6 for group in groups]
        for batch in token_batches(sizes, args.budget, rng):
            yield [index for number in batch for index in groups[number]]


def score_loss(predicted: torch.Tensor, examples: list[Example], within: float) -> torch.Tensor:
    """Return squared error of scores in 0..1 (1 best), the error inside a source weighted up."""
    targets = torch.tensor([1 - e.score / 25 for e in examples])
    error = predicted - targets
    if not within:
        return error.square().mean()
    number: dict[tuple[int, ...], int] = {}
    group = torch.tensor([number.setdefault(tuple(e.src), len(number)) for e in examples])
    counts = torch.zeros(len(number)).index_add(0, group, torch.ones(len(examples)))
    centres = torch.zeros(len(number)).index_add(0, group, error) / counts
    return error.square().mean() + within * (error - centres[group]).square().mean()


def prefix_mask(valid: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Return the [B, S, S] mask of a prefix LM.

    Source positions see the source. Candidate positions see the source, and the candidate up to
    themselves.
    """
    size = valid.shape[1]
    before = torch.tril(torch.ones(size, size, dtype=torch.bool))
    see = ~causal[:, None, :] | (causal[:, :, None] & before)
    return see & valid[:, None, :]


def tag_loss(logits: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """Return cross-entropy of the severity tags; -1 marks positions outside the candidate."""
    return functional.cross_entropy(
        logits.float().reshape(-1, 4), tags.reshape(-1), ignore_index=-1
    )


def token_loss(hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor) -> Any:
    """Return cross-entropy of wanted tokens (-1: none) against the embeddings as output
    weights.
    """
    keep = targets != -1
    if not keep.any():
        return hidden.sum() * 0
    logits = hidden[keep] @ embedding.T
    return functional.cross_entropy(logits.float(), targets[keep])


def widen(rows: list[list[int]], width: int) -> torch.Tensor:
    """Return rows of labels as a matrix of ``width`` columns, -1 where there is none."""
    return torch.tensor([row[:width] + [-1] * (width - len(row)) for row in rows])


def padded_ids(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and their attention mask. PAD is never a text token."""
    ids = pad(rows, PAD)
    return ids, (ids != PAD).long()


def nexts_of(prefix: int, mt: list[int]) -> list[int]:
    """Return next-token targets of a row whose candidate starts at position ``prefix``."""
    return [-1] * (prefix - 1) + mt + [EOS]


def dev_figures(score: Callable[[list[Example]], list[float]], tokenizer: Any, folder: Path) -> str:
    """Return Spearman with sentence chrF on samples of the dev sources: overall and inside a
    source.
    """
    labeller = Labeller(tokenizer)
    rows = read_jsonl(folder / "dev.jsonl")
    examples = [labeller.sample(row["src"], row["mt"], row["ref"]) for row in rows]
    scores = score(examples)
    chrf = [1 - e.score / 25 for e in examples]
    overall, within = correlations([row["src"] for row in rows], scores, chrf)
    return f"dev Spearman {overall:.3f}, within a source {within:.3f}"


def correlations(groups: list[str], scores: list[float], chrf: list[float]) -> tuple[float, float]:
    """Return Spearman over everything, and its mean over the groups where it is defined."""
    members = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    inside = []
    for indices in members.values():
        a, b = [scores[i] for i in indices], [chrf[i] for i in indices]
        if len(set(a)) > 1 and len(set(b)) > 1:
            inside.append(spearmanr(a, b).statistic)
    return float(spearmanr(scores, chrf).statistic), float(np.mean(inside))


def chooser(share: float, seed: int) -> Callable[[], bool]:
    """Return a function that draws whether a batch gets the reference."""
    rng = random.Random(seed)
    return lambda: rng.random() < share
