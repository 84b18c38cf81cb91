"""Shared parts of the training scripts: seeds, batches by token budget, and a timed optimizer
loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sacrebleu.metrics.chrf import CHRF

WORK = Path("runs/demo_train")
_CHRF = CHRF()


def setup(seed: int) -> None:
    """Set one thread (two processes on two cores are faster than one) and fixed seeds."""
    torch.set_num_threads(1)
    random.seed(seed)
    torch.manual_seed(seed)


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """Return sentence chrF of sacrebleu (character order 6, beta 2), 0 to 100."""
    return _CHRF.sentence_score(hypothesis, [reference]).score


def token_batches(lengths: list[int], budget: int, rng: random.Random) -> list[list[int]]:
    """Return shuffled batches of indices of similar length, at most `budget` padded tokens each."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + rng.random() * 3)
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if current and longest * (len(current) + 1) > budget:
            batches.append(current)
            current, longest = [], lengths[index]
        current.append(index)
    batches.append(current)
    rng.shuffle(batches)
    return batches


def endless(lengths: list[int], budget: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield batches of indices, epoch after epoch."""
    while True:
        yield from token_batches(lengths, budget, rng)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Return a right-padded integer matrix."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def parameter_groups(module: torch.nn.Module, lr: float) -> list[dict]:
    """Return parameter groups with a smaller learning rate for T5's query weights.

    T5 does not scale its attention scores, so its query weights are small and must move in smaller
    steps. At the common rate the attention saturates on one token and learning stops.
    """
    query = [p for name, p in module.named_parameters() if name.endswith(".q.weight")]
    ids = {id(p) for p in query}
    other_parameters = [p for p in module.parameters() if id(p) not in ids]
    return [{"params": other_parameters, "lr": lr}, {"params": query, "lr": lr / 6}]


def fit(
    parameters: list,
    loss_of_step: Callable[[int], torch.Tensor],
    steps: int,
    lr: float,
    call_at_step: dict[int, Callable[[], None]] | None = None,
    name: str = "train",
) -> None:
    """Train with AdamW, 100 warm-up steps, linear decay and bf16 autocast; log loss and seconds.

    parameters: tensors, or groups as AdamW takes them.
    """
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(100, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.0, (steps - s) / (steps - warmup + 1)))
    )
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    start, total = time.time(), 0.0
    for step in range(1, steps + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of_step(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        if step % 200 == 0:
            print(
                f"{name} step {step}/{steps} loss {total / 200:.4f} {time.time() - start:.0f}s",
                flush=True,
            )
            total = 0.0
        if call_at_step and step in call_at_step:
            call_at_step[step]()
