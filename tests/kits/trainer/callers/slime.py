"""Reimplements how slime calls a reward function, and what it makes of the rewards.

Recorded from THUDM/slime: `slime/utils/types.py` at 0d234f3e, `slime/rollout/rm_hub/__init__.py` at
0b420f1e, `slime/rollout/sglang_rollout.py` at 0044b40d, `slime/ray/rollout.py` at a51f0714.
"""

from __future__ import annotations

import asyncio
import importlib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

ADAPTER = "scorekit.adapters.slime"


class Status(Enum):
    """The state of a completion."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """A completion, with the fields that reward functions read and write."""

    prompt: Any = "Translate."
    response: str = ""
    label: Any = None
    group_index: int | None = None
    index: int | None = None
    response_length: int = 3
    reward: Any = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_reward_value(self, args: Namespace) -> float:
        """Return the number that is trained on."""
        value: float = self.reward[args.reward_key] if args.reward_key else self.reward
        return value


def slime_args(**values: Any) -> Namespace:
    """Return slime's arguments that concern rewards, those of its defaults but for our paths."""
    defaults = {
        "custom_rm_path": f"{ADAPTER}.reward",
        "custom_reward_post_process_path": f"{ADAPTER}.post_process_rewards",
        "custom_rollout_log_function_path": f"{ADAPTER}.log_components",
        "group_rm": False,
        "reward_key": None,
        "eval_reward_key": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 2,
    }
    return Namespace(**defaults | values)


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def _score_sample(args: Namespace, sample: Sample) -> None:
    if sample.status is not Status.ABORTED and sample.reward is None:
        sample.reward = await _load(args.custom_rm_path)(args, sample)


async def _score_group(args: Namespace, group: list[Sample]) -> None:
    if not args.group_rm:
        await asyncio.gather(*(_score_sample(args, sample) for sample in group))
        return
    rewards = await _load(args.custom_rm_path)(args, group)
    for sample, reward in zip(group, rewards, strict=False):
        sample.reward = reward


def score(args: Namespace, groups: Sequence[list[Sample]]) -> list[Sample]:
    """Score the samples of a rollout, all at once. Any exception ends the rollout."""

    async def score_all() -> None:
        await asyncio.gather(*(_score_group(args, group) for group in groups))

    asyncio.run(score_all())
    return [sample for group in groups for sample in group]


def train_data(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """Return what slime trains on: rewards, raw rewards for its log, and loss masks."""
    metrics: dict[str, Any] = {}
    _load(args.custom_rollout_log_function_path)(0, args, samples, metrics, 1.0)
    raw, rewards = _load(args.custom_reward_post_process_path)(args, samples)
    assert len(raw) == len(rewards) == len(samples)
    masks = []
    for sample in samples:
        mask = sample.loss_mask or [1] * sample.response_length
        masks.append([0] * sample.response_length if sample.remove_sample else mask)
    return {"rewards": rewards, "raw_reward": raw, "loss_masks": masks, "metrics": [metrics]}


def stock_rewards(args: Namespace, values: Sequence[float]) -> list[float]:
    """Return what slime's own function makes of the rewards of complete groups."""
    if args.advantage_estimator in ("ppo", "reinforce_plus_plus") or not args.rewards_normalization:
        return list(values)
    rewards = torch.tensor(values, dtype=torch.float).reshape(-1, args.n_samples_per_prompt)
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    if args.advantage_estimator != "reinforce_plus_plus_baseline" and args.grpo_std_normalization:
        rewards = rewards / (rewards.std(dim=-1, keepdim=True) + 1e-6)
    result: list[float] = rewards.flatten().tolist()
    return result
