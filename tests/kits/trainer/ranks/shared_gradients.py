"""Computes gradients of a tiny policy in any number of processes, with many cuts into passes.

torchrun --nproc_per_node 2 -m tests.kits.trainer.ranks.shared_gradients OUT [--few]

--few: some of the cuts, and in float32 some of the cases.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.kits.float64 import float64
from tests.kits.trainer.images import rollouts as image_rollouts
from tests.kits.trainer.images import tiny
from tests.kits.trainer.ranks.sharded_trainer import ShardedWorld
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl import update as passes_module
from trainer.rl.advantage import TokenAdvantages, pad_rows, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.rollout import Rollout, action_masks
from trainer.rl.update import ForwardOptions, accumulate_gradients, recompute_old_logprobs

#: Prompt and completion tokens of texts: of very different lengths.
LENGTHS = [
    (2, 3),
    (4, 1),
    (3, 36),
    (2, 2),
    (5, 4),
    (3, 12),
    (2, 70),
    (9, 8),
    (4, 4),
    (2, 1),
    (6, 25),
]
#: Name -> `micro_batch_tokens`, or the seed of a random cut.
CUTS: dict[str, dict[str, int]] = {
    "one a pass": {"tokens": 1},
    "several a pass": {"tokens": 60},
    "one pass": {"tokens": 10_000},
    "any cut": {"seed": 1},
    "any other cut": {"seed": 2},
}
#: Name -> the kind of rollouts and the settings of the loss.
CASES: dict[str, dict[str, Any]] = {
    "translation": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "sequence mean": {"kl_coef": 0.1, "loss_mean": "sequence"},
    "masked tokens": {"kl_coef": 0.1, "importance_mode": "token_mask"},
    "masked sequences": {"importance_mode": "sequence_mask", "loss_mean": "sequence"},
    "search": {"algorithm": "gspo", "clip_eps": 0.2, "loss_mean": "sequence", "kl_coef": 0.0},
}
#: With `--few`: the cuts of each kind of world and number.
FEW_CUTS = {
    ("float64", "plain"): ("one a pass", "several a pass", "one pass", "any cut"),
    ("float64", "sharded"): ("several a pass", "any cut"),
    ("float32", "plain"): ("several a pass", "any other cut"),
    ("float32", "sharded"): (),
}
FEW_CASES = {"float64": tuple(CASES), "float32": ("translation", "search")}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def translation_batch() -> tuple[list[Rollout], TokenAdvantages]:
    """Return texts with token advantages, a KL and an importance correction."""
    generator = torch.Generator().manual_seed(3)

    def numbers(n: int) -> list[float]:
        return (torch.rand(n, generator=generator) - 2.5).tolist()

    def ids(n: int) -> list[int]:
        return torch.randint(3, 11, (n,), generator=generator).tolist()

    rollouts: list[Rollout] = [
        rollout(
            ids(p),
            ids(t),
            old_logprobs=numbers(t),
            ref_logprobs=numbers(t),
            sampler_logprobs=numbers(t),
        )
        for p, t in LENGTHS
    ]
    rewards = torch.tensor(numbers(len(LENGTHS)))
    token_rewards = pad_rows([numbers(t) for _, t in LENGTHS])
    mask = action_masks(rollouts)
    return rollouts, token_advantages(rewards, token_rewards, mask, range(len(LENGTHS)))


def search_batch() -> tuple[list[Rollout], TokenAdvantages]:
    """Return episodes of which most have images, with action masks, each with one advantage."""
    rollouts = [*image_rollouts(), *image_rollouts()[:3]]
    generator = torch.Generator().manual_seed(4)
    rewards = torch.randn(len(rollouts), generator=generator)
    mask = action_masks(rollouts)
    advantages = token_advantages(
        rewards, torch.zeros(mask.shape), mask, [0] * 4 + [1] * (len(rollouts) - 4)
    )
    return rollouts, advantages


@contextmanager
def random_cut(seed: int) -> Iterator[None]:
    """Deal single sequences and pairs to processes at random; some may get none."""

    def share(
        lengths: Sequence[int], chosen: Sequence[int], max_tokens: int, num: int, **_: Any
    ) -> list[list[list[int]]]:
        numbers = random.Random(seed)
        rows = numbers.sample(list(chosen), len(chosen))
        shares: list[list[list[int]]] = [[] for _ in range(num)]
        while rows:
            size = numbers.randint(1, 2)
            shares[numbers.randrange(num)].append(rows[:size])
            rows = rows[size:]
        return shares

    with patch.object(passes_module, "share_sequences", share):
        yield


def gradients(
    world: DistributedContext, case: str, dtype: torch.dtype, tokens: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Return the gradients, stats and old log-probabilities of a batch, on every process."""
    cfg = RLConfig(**CASES[case], micro_batch_tokens=tokens)
    is_search = case == "search"
    plain: nn.Module = (
        tiny("qwen2_5_vl", spread=0.1) if is_search else tiny_llama(letter_tokenizer())
    )
    if is_search:
        for name, weight in plain.named_parameters():
            weight.requires_grad = "visual" not in name
    for weight in plain.parameters():
        weight.data = weight.data.to(dtype)
    model, _ = world.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rollouts, advantages = search_batch() if is_search else translation_batch()
    options = ForwardOptions(model, cfg, world)
    chosen = [row for row in range(len(rollouts)) if row != 3]  # a minibatch is not all rows
    with random_cut(seed) if seed else nullcontext():
        if is_search:
            recompute_old_logprobs(rollouts, [chosen], options)
        logprobs = [rollouts[row].old_logprobs for row in chosen]
        if is_search:  # so that ratios are not 1
            shifts = torch.Generator().manual_seed(5)
            for row in chosen:
                old = torch.tensor(rollouts[row].old_logprobs, dtype=torch.float64)
                shift = torch.rand(len(old), generator=shifts, dtype=torch.float64) / 10
                rollouts[row].old_logprobs = (old - shift).tolist()
        stats = world.sum(accumulate_gradients(rollouts, advantages, chosen, options))
    grads = [p.grad for p in plain.parameters() if p.requires_grad and p.grad is not None]
    full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    flat = torch.cat([g.detach().flatten().double() for g in full])
    return {"gradient": flat, "stats": stats, "logprobs": logprobs}


def main() -> None:
    """Rank 0 writes what `gradients` gives for each case, type and cut."""
    plain, sharded = DistributedContext(torch.device("cpu")), ShardedWorld(torch.device("cpu"))
    worlds = {"plain": plain} | ({"sharded": sharded} if plain.size > 1 else {})
    results: dict[str, Any] = {}
    takes_all = "--few" not in sys.argv
    for type_name, dtype in DTYPES.items():
        with float64() if dtype is torch.float64 else nullcontext():
            for case in CASES:
                for world_name, world in worlds.items():
                    for cut, options in CUTS.items():
                        chosen = case in FEW_CASES[type_name]
                        if not takes_all and not (
                            chosen and cut in FEW_CUTS[type_name, world_name]
                        ):
                            continue
                        name = f"{type_name}, {case}, {world_name}, {cut}"
                        results[name] = gradients(world, case, dtype, **options)
    if plain.is_main:
        torch.save({"processes": plain.size, "results": results}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
