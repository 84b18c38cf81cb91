"""Runs updates of a tiny policy in any number of processes, for the tests of several processes.

torchrun --nproc_per_node 2 -m tests.kits.trainer.one_update OUT [CASE ...]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kits.float64 import doubled, float64
from tests.kits.trainer.images import NEVER, tiny
from tests.kits.trainer.images import rollouts as seen_rollouts
from tests.kits.trainer.ranks.sharded_trainer import ShardedWorld
from tests.kits.trainer.runs import letter_tokenizer, rollout, tiny_llama
from trainer.rl.advantage import TokenAdvantages, pad_rows, token_advantages
from trainer.rl.config import RLConfig
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.forward import Image
from trainer.rl.policy import freeze_vision
from trainer.rl.rollout import Rollout, action_masks, rollout_logprobs
from trainer.rl.update import ForwardOptions, accumulate_gradients, update_policy
from trainer.translation.config import GenerationConfig

#: Tokens of prompt and completion: three micro-batches of `CONFIG`, which two processes cannot
#: share evenly.
LENGTHS = [(2, 3), (4, 1), (3, 6), (2, 2), (5, 4)]
PROMPTS = [[3, 4, 2], [5, 2], [6, 6, 6, 2], [7, 8, 2]]
#: Name -> arguments of `update`. `one`: a batch of one rollout, so that most have nothing to do.
CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"loss_mean": "sequence"},
    "sharded": {"shard": True},
    "one": {"prompts": 1},
    "one sharded": {"prompts": 1, "shard": True},
    "gspo": {"algorithm": "gspo"},
    "gspo sharded": {"algorithm": "gspo", "shard": True},
    "images": {"images": True, "prompts": 4},
    "images sharded": {"images": True, "prompts": 4, "shard": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 sharded": {"dtype": "bfloat16", "shard": True},
}


def config(loss_mean: str, algorithm: str = "ppo") -> RLConfig:
    """Return a config of two passes of two steps, with every term of the loss."""
    return RLConfig(
        algorithm=algorithm,
        clip_eps=0.2,
        loss_mean=loss_mean,
        micro_batch_tokens=16,
        minibatches=2,
        entropy_coef=0.01,
        kl_coef=0.1,
    )


def batch(prompts: int, images: bool) -> tuple[list[Rollout], TokenAdvantages]:
    """Return rollouts and advantages, the same in every process.

    images: whether three of four rollouts have images.
    """
    lengths = LENGTHS[:prompts]
    generator = torch.Generator().manual_seed(3)

    def numbers(n: int) -> list[float]:
        return (torch.rand(n, generator=generator) - 2.5).tolist()

    def ids(n: int) -> list[int]:
        return torch.randint(3, 11, (n,), generator=generator).tolist()

    rollouts: list[Rollout] = [
        rollout(ids(p), ids(t), old_logprobs=numbers(t), ref_logprobs=numbers(t))
        for p, t in lengths
    ]
    if images:
        rollouts = seen_rollouts()
        lengths = [(0, len(row.completion_token_ids)) for row in rollouts]
        for row, (_, t) in zip(rollouts, lengths, strict=True):
            row.old_logprobs, row.ref_logprobs = numbers(t), numbers(t)
    mask_BT = action_masks(rollouts)
    tokens_BT = pad_rows([numbers(t) for _, t in lengths])
    rewards_B = torch.tensor(numbers(len(lengths)))
    return rollouts, token_advantages(rewards_B, tokens_BT, mask_BT, range(len(lengths)))


def update(
    world: DistributedContext,
    loss_mean: str = "token",
    prompts: int = 5,
    dtype: str = "float32",
    shard: bool = False,
    algorithm: str = "ppo",
    images: bool = False,
) -> dict[str, Any]:
    """Run one update and return its results, complete on every process."""
    plain, tokenizer = tiny_llama(letter_tokenizer()), letter_tokenizer()
    if images:
        plain = tiny("qwen2_5_vl")
        freeze_vision(plain)
    elif dtype == "float32":
        plain = doubled(plain)  # autocast knows nothing of float64
    reference = copy.deepcopy(plain)
    if world.is_sharded:
        world.shard(reference)
    assert plain.generation_config is not None
    plain.generation_config.eos_token_id = [1, 6]  # so that some end before others
    # Not AdamW, which makes whole steps of gradients that differ by rounding alone.
    model, optimizer = world.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    cfg, (rollouts, advantages) = config(loss_mean, algorithm), batch(prompts, images)
    if dtype == "bfloat16":  # any number of processes makes these passes; other shapes round else
        cfg = cfg.model_copy(update={"micro_batch_tokens": 1})
    passes = ForwardOptions(model, cfg, world, dtype=dtype)
    accumulate_gradients(rollouts, advantages, range(prompts), passes)
    gradients = {
        name: _full_tensor(p.grad) for name, p in plain.named_parameters() if p.requires_grad
    }
    stats = update_policy(
        rollouts,
        advantages,
        optimizer,
        cfg,
        policy_model=model,
        temperature=1.0,
        pad_id=0,
        dtype=dtype,
        world=world,
    )
    weights = {name: _full_tensor(p) for name, p in plain.named_parameters()}
    local_rollouts = world.split_items(rollouts)
    with autocast(world.device, dtype):
        logprobs_by_pass = [
            rollout_logprobs(
                [rollout for _, rollout in local_rollouts], of_model, 1.0, 0, 16, world
            )
            for of_model in (model, reference)
        ]
    indices = [index for index, _ in local_rollouts]
    logprobs = world.gather(list(zip(indices, *logprobs_by_pass, strict=True)))
    sampler = GenerateSampler(model, tokenizer, world, banned_token_ids=NEVER if images else ())
    greedy = GenerationConfig(
        temperature=0, num_samples_per_prompt=1, max_new_tokens=8, batch_size=1
    )
    episodes: list[tuple[list[int], Sequence[Image]]] = [(ids, ()) for ids in PROMPTS[:prompts]]
    if images:
        episodes = [(r.prompt_input_ids + r.completion_token_ids, r.images) for r in rollouts]
    local_episodes = world.split_items(episodes)
    sampled = sampler.sample(
        [ids for _, (ids, _) in local_episodes],
        greedy,
        images=[episode_images for _, (_, episode_images) in local_episodes],
        with_logprobs=False,
    )
    completions = world.gather(
        [(local_episodes[i][0], completion[0].token_ids) for i, completion in sampled]
    )
    return {
        "logprobs": [row for _, *rows in sorted(logprobs) for row in rows],
        "gradients": gradients,
        "weights": weights,
        "figures": stats.line(),
        "completions": [ids for _, ids in sorted(completions)],
    }


def _full_tensor(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


@float64()
def main() -> None:
    """Rank 0 writes what `update` gives for each of the cases, by default all of `CASES`."""
    path, *names = sys.argv[1:]
    cases = {name: CASES[name] for name in names or CASES}
    world, sharded = DistributedContext(torch.device("cpu")), ShardedWorld(torch.device("cpu"))
    results = {
        name: update(sharded if case.get("shard") and world.size > 1 else world, **case)
        for name, case in cases.items()
    }
    if world.is_main:
        torch.save({"processes": world.size, "found": results}, Path(path))


if __name__ == "__main__":
    main()
