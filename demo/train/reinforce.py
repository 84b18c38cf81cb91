"""A small in-process PPO loop: for experiments, and for policy samples "after some RL".

    python -m demo.train.reinforce --models demo/models --updates 24 --seed 1

The rewards are those of `trainer/` (5 - MetricX on every token, severity weights on the tokens of
xCOMET's spans, normalized over the valid tokens of the batch), without HTTP. `--shuffle` gives the
rewards to the wrong samples, as a control. Prints held-out stats before and after.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo.train.checkpoints import MetricX, XComet
from demo.train.common import sentence_chrf, setup
from demo.train.data import DATA, read_jsonl
from demo.train.evaluate_models import MODELS, mean, translation
from demo.train.policy import load, prompt_ids, sample, save
from demo.train.tokenizer import EOS, PAD
from scorekit.command import run_command
from scorekit.paired import mean_interval

WEIGHTS = {"minor": -1.0, "major": -5.0, "critical": -10.0}


@dataclass
class Rollout:
    """Left-padded prompts and right-padded completions of one batch."""

    ids: torch.Tensor
    mask: torch.Tensor
    valid: torch.Tensor  # 1 on completion tokens, EOS included
    start: int  # column of the first completion token
    completions: list[list[int]]
    texts: list[str]
    sources: list[str]


@torch.no_grad()
def generate(model: Any, tokenizer: Any, sources: list[str], args: argparse.Namespace) -> Rollout:
    """Sample one completion a source."""
    model.eval()
    prompts = [prompt_ids(tokenizer, source) for source in sources]
    start = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (start - len(p)) + p for p in prompts])
    output = model.generate(
        input_ids=ids,
        attention_mask=(ids != PAD).long(),
        max_new_tokens=args.max_new_tokens,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    rows = output[:, start:].tolist()
    completions = [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
    width = max(map(len, completions))
    lengths = torch.tensor([len(c) for c in completions])
    valid = (torch.arange(width)[None] < lengths[:, None]).float()
    full = torch.cat([ids, output[:, start : start + width]], 1)
    mask = torch.cat([(ids != PAD).long(), valid.long()], 1)
    texts = [tokenizer.decode([t for t in c if t != EOS]) for c in completions]
    return Rollout(full * mask, mask, valid, start, completions, texts, sources)


def token_penalties(tokenizer: Any, rollout: Rollout, index: int, spans: list[dict]) -> list[float]:
    """Return sum of the severity weights of the spans that overlap each token; EOS gets none."""
    text = rollout.texts[index]
    shift = len(text) - len(text.lstrip())  # the metric saw the stripped text
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    body = [t for t in rollout.completions[index] if t != EOS]
    if encoding["input_ids"] != body:
        return []
    return [
        sum(
            WEIGHTS[s["severity"]]
            for s in spans
            if s["start"] + shift < end and start < s["end"] + shift
        )
        for start, end in encoding["offset_mapping"]
    ]


def rewards(metrics: Any, tokenizer: Any, rollout: Rollout, args: argparse.Namespace) -> Any:
    """Return the reward of every token, and the mean scores of both metrics."""
    texts = [text.strip() for text in rollout.texts]
    scores = metrics[0](rollout.sources, texts)
    quality, spans = metrics[1](rollout.sources, texts)
    sequence = torch.tensor([5.0 - score for score in scores])
    for index, completion in enumerate(rollout.completions):
        if completion[-1] != EOS:
            sequence[index] -= args.no_eos_penalty
    if args.center_groups:
        groups = sequence.view(-1, args.samples)
        sequence = (groups - groups.mean(1, keepdim=True)).view(-1)
    reward = sequence[:, None].expand(rollout.valid.shape).clone()
    for index, marks in enumerate(spans):
        penalties = token_penalties(tokenizer, rollout, index, marks) if args.span_weight else []
        reward[index, : len(penalties)] += args.span_weight * torch.tensor(penalties)
    if args.shuffle:
        reward = reward[torch.randperm(len(reward))]
    return reward, mean(scores), mean(quality)


def normalised(reward: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return (reward - mean) / deviation over the valid tokens of the batch."""
    count = valid.sum()
    centre = (reward * valid).sum() / count
    deviation = ((reward - centre).square() * valid).sum().div(count).sqrt()
    return (reward - centre) / (deviation + 1e-6)


def log_probabilities(model: Any, rollout: Rollout, rows: torch.Tensor, temperature: float) -> Any:
    """Return the log-probabilities of the sampled tokens, [rows, longest].

    They are those of the distribution that the tokens were sampled from.
    """
    mask = rollout.mask[rows]
    used = mask.any(0).nonzero()
    first, last = int(used.min()), int(used.max()) + 1  # no columns that are padding everywhere
    ids, mask = rollout.ids[rows, first:last], mask[:, first:last]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    start = rollout.start - first
    logits = model.lm_head(hidden[:, start - 1 : -1]).float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)


def update(
    model: Any, reference: Any, optimizer: Any, rollout: Rollout, advantage: Any, args: Any
) -> float:
    """Run PPO passes over the batch, in micro-batches of similar length, and return the KL (k2)."""
    order = torch.tensor([len(c) for c in rollout.completions]).argsort()
    parts = order.split(64)
    with torch.no_grad():
        old = [log_probabilities(model, rollout, p, args.temperature) for p in parts]
        fixed = [log_probabilities(reference, rollout, p, args.temperature) for p in parts]
    total = rollout.valid.sum()
    for _ in range(args.epochs):
        divergence = 0.0
        for rows, before, anchor in zip(parts, old, fixed, strict=True):
            now = log_probabilities(model, rollout, rows, args.temperature)
            width = now.shape[1]
            gain, valid = advantage[rows, :width], rollout.valid[rows, :width]
            ratio = (now - before).exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            kl = 0.5 * (now - anchor).square()
            loss = ((args.kl * kl - surrogate) * valid).sum() / total
            loss.backward()
            divergence += float((kl.detach() * valid).sum() / total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return divergence


def evaluate(model: Any, tokenizer: Any, metrics: Any, rows: list[dict], label: str) -> list[float]:
    """Print greedy stats; return the sentence chrF of every source."""
    sources, refs = [r["src_text"] for r in rows], [r["ref_text"] for r in rows]
    outputs = sample(model, tokenizer, sources, 0.0)
    stats = translation(outputs, refs)
    stats["metricx"] = mean(metrics[0](sources, outputs))
    quality, spans = metrics[1](sources, outputs)
    stats |= {"xcomet": mean(quality), "spans": mean(map(len, spans))}
    print(json.dumps({"at": label} | {k: round(v, 3) for k, v in stats.items()}), flush=True)
    return [sentence_chrf(o, r) for o, r in zip(outputs, refs, strict=True)]


def interval(before: list[float], after: list[float]) -> str:
    """Return the mean paired difference with its 95 % bootstrap interval."""
    change = np.array(after) - np.array(before)
    low, high = mean_interval(change.tolist())
    return f"sentence chrF {change.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


def run(args: argparse.Namespace) -> None:
    """Run the full loop."""
    rng, start = random.Random(args.seed), time.time()
    model, tokenizer = load(args.policy or args.models / "policy")
    reference = copy.deepcopy(model).eval()
    metrics = MetricX(args.models / "metricx"), XComet(args.models / "xcomet")
    heldout = read_jsonl(DATA / f"{args.split}.jsonl")
    prompts = [row["src_text"] for row in read_jsonl(DATA / "rl_prompts.jsonl")]
    rng.shuffle(prompts)
    before = evaluate(model, tokenizer, metrics, heldout, "start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(args.updates):
        decay = min((step + 1) / 3, (args.updates - step) / args.updates)
        optimizer.param_groups[0]["lr"] = args.lr * decay
        first = step * args.prompts % (len(prompts) - args.prompts)
        sources = [s for s in prompts[first : first + args.prompts] for _ in range(args.samples)]
        rollout = generate(model, tokenizer, sources, args)
        reward, score, quality = rewards(metrics, tokenizer, rollout, args)
        advantage = normalised(reward, rollout.valid)
        kl = update(model, reference, optimizer, rollout, advantage, args)
        print(
            f"update {step + 1} metricx {score:.2f} xcomet {quality:.3f} kl {kl:.3f} "
            f"length {mean(map(len, rollout.texts)):.1f} {time.time() - start:.0f}s",
            flush=True,
        )
        if (step + 1) % args.every == 0 and step + 1 < args.updates:
            evaluate(model, tokenizer, metrics, heldout, f"update {step + 1}")
    after = evaluate(model, tokenizer, metrics, heldout, "end")
    print(f"{interval(before, after)} seed {args.seed} {time.time() - start:.0f}s", flush=True)
    if args.out:
        save(model, tokenizer, args.out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--policy", type=Path, help="start from this policy instead")
    parser.add_argument("--split", default="heldout")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--kl", type=float, default=0.05)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--span-weight", type=float, default=0.1)
    parser.add_argument("--no-eos-penalty", type=float, default=5.0)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--center-groups", action="store_true")
    parser.add_argument("--shuffle", action="store_true", help="control: rewards of other samples")
    parser.add_argument("--every", type=int, default=1000, help="evaluate every so many updates")
    parser.add_argument("--out", type=Path, help="save the policy here")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    run(args)


if __name__ == "__main__":
    run_command(main, stdout="log")
