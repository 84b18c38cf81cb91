"""Check that advantages, losses, gradients and updates of each algorithm stay what they were.

The file of golden values is what the code gave when each algorithm was written. Its inputs are
numbers of Python's own generator, which are the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import pad_rows, token_advantages
from trainer.rl.algorithms.algorithm import TokenBatch
from trainer.rl.config import RLConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.loss import policy_loss, sequence_normalizer
from trainer.rl.rollout import Rollout, action_masks
from trainer.rl.update import ForwardOptions, update_policy
from trainer.runs.rollout_stats import importance_stats
from trainer.translation.rewards.sample_reward import SampleReward, rollout_advantages

GOLDEN = json.loads(
    (Path(__file__).parents[4] / "data/algorithms.json").read_text(encoding="utf-8")
)
ALGORITHMS = ("ppo", "gspo", "reinforce")
LENGTHS = [(2, 3), (4, 1), (3, 6), (2, 2), (5, 4)]
#: The cosines of a model's rotary embedding are float32, with errors of 6e-8, on any processor.
ROTARY = 1e-6


def near(first: float, width: float, count: int, random: Random) -> list[float]:
    return [first + width * random.uniform(-1, 1) for _ in range(count)]


def rollouts_of(seed: int) -> list[Rollout]:
    """Return rollouts in two groups, with observations in one and another truncated."""
    random = Random(seed)
    rollouts: list[Rollout] = []
    for row, (prompt, tokens) in enumerate(LENGTHS):
        old = near(-2.2, 0.5, tokens, random)
        logprobs = {
            "old_logprobs": old,
            "ref_logprobs": [value + random.uniform(-0.2, 0.2) for value in old],
            "sampler_logprobs": [value + random.uniform(-0.9, 0.9) for value in old],
        }
        ids = [[random.randrange(3, 11) for _ in range(n)] for n in (prompt, tokens)]
        rollouts.append(rollout(*ids, group=row // 3, **logprobs))
    rollouts[2].action_mask = [True, True, False, False, True, True]
    rollouts[3].finish_reason = "length"
    return rollouts


def advantages_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the advantages of a translation batch, with a span penalty and an unread token."""
    rollouts, random = rollouts_of(1), Random(2)
    rewards = [
        SampleReward(
            random.uniform(-3, 3),
            near(0.0, 1.0, len(sample.completion_token_ids), random),
            sample.actions,
        )
        for sample in rollouts
    ]
    rewards[4].valid[-1] = False
    advantages = rollout_advantages(rollouts, rewards, RLConfig.model_validate(options))
    return {
        "raw": advantages.raw.tolist(),
        "values": advantages.values.tolist(),
        "mask": advantages.mask.tolist(),
        "kl_mask": advantages.kl_token_mask.tolist(),
    }


def loss_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return loss, stats and gradient of a minibatch: corrected, with a KL and an entropy."""
    random = Random(3)
    cfg = RLConfig.model_validate(options)

    def numbers(first: float, width: float) -> Tensor:
        return torch.tensor([near(first, width, 6, random) for _ in range(4)], dtype=torch.float64)

    mask = torch.tensor(
        [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0]]
    ).bool()
    old = numbers(-2.0, 1.0)
    new = (old + numbers(0.0, 0.3)).requires_grad_()
    entropy = numbers(1.0, 0.5).requires_grad_()
    batch = TokenBatch(
        old, numbers(0.0, 2.0), mask, old + numbers(0.0, 0.4), numbers(1.0, 0.5), mask | mask[0]
    )
    counts, kl_counts = mask.sum(-1).tolist(), (mask | mask[0]).sum(-1).tolist()
    normalizers = sequence_normalizer(counts, counts), float(sum(kl_counts))
    world = DistributedContext(torch.device("cpu"))
    weights = ForwardOptions(torch.nn.Linear(1, 1), cfg, world).weights
    algorithm = cfg.chosen_algorithm
    loss, stats = policy_loss(
        algorithm, new, entropy, batch, normalizers[0], weights, normalizers[1]
    )
    gradients = torch.autograd.grad(loss, (new, entropy))
    return {
        "loss": loss.item(),
        "stats": stats,
        "gradients": [gradient.tolist() for gradient in gradients],
    }


def update_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the stats of an update of a small model, and what it did to the weights."""
    model = doubled(tiny_llama(letter_tokenizer()))
    for number, weight in enumerate(model.parameters()):
        positions = torch.arange(weight.numel(), dtype=torch.float64)
        weight.data = 0.3 * (positions * (number + 1)).sin().reshape(weight.shape)
    rollouts, random = rollouts_of(4), Random(5)
    mask_BT = action_masks(rollouts)
    advantages = token_advantages(
        torch.tensor(near(0.0, 1.0, 5, random), dtype=torch.float64),
        pad_rows([near(0.0, 0.5, tokens, random) for _, tokens in LENGTHS]),
        mask_BT,
        [0] * 5,
    )
    cfg = RLConfig.model_validate(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"policy_model": model, "temperature": 0.8, "pad_id": 0, "seed": 6}
    stats = update_policy(rollouts, advantages, optimizer, cfg, **options)
    return {
        "stats": stats.line(),
        "importance": importance_stats(rollouts, cfg),
        "weights": [
            [weight.sum().item(), weight.square().sum().item()] for weight in model.parameters()
        ],
    }


_PLAIN = {"kl_coef": 0.1, "entropy_coef": 0.02, "clip_eps": 0.2}
_WIDER = {"clip_eps_high": 0.3, "kl_estimator": "k3", "loss_mean": "sequence"}
#: Name of a case -> the function and its options of `rl`.
CASES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]] = {
    **{
        f"advantages {norm} {kl_in}": (
            advantages_of,
            {"advantage_norm": norm, "kl_in": kl_in, "mask_truncated": kl_in == "reward"},
        )
        for norm in ("batch", "group", "grpo")
        for kl_in in ("loss", "reward")
    },
    "advantages centered": (advantages_of, {"center_groups": True, "kl_coef": 0}),
    **{
        f"{kind} {algorithm} {name}": (function, {"algorithm": algorithm, **settings})
        for kind, function in (("loss", loss_of), ("update", update_of))
        for algorithm in ALGORITHMS
        for name, settings in (
            ("plain", _PLAIN),
            ("wider", _PLAIN | _WIDER),
            ("defaults", {"minibatches": 2, "max_log_ratio": 0.4}),
        )
    },
}


def is_close(value: Any, golden: Any, tolerance: float) -> bool:
    """Return whether two trees of lists and dictionaries have the same numbers."""
    if isinstance(golden, dict):
        return value.keys() == golden.keys() and all(
            is_close(value[key], golden[key], tolerance) for key in golden
        )
    if isinstance(golden, list):
        return len(value) == len(golden) and all(
            is_close(entry, golden_entry, tolerance)
            for entry, golden_entry in zip(value, golden, strict=True)
        )
    return bool(value == golden if golden is None else abs(value - golden) <= tolerance)


@pytest.mark.parametrize("name", CASES)
@float64()
def test_the_numbers_of_each_algorithm_are_those_of_the_golden_file(name: str) -> None:
    function, options = CASES[name]
    tolerance = ROTARY if function is update_of else CLOSE
    assert is_close(function(options), GOLDEN[name], tolerance), name
