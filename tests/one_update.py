"""Updates of a tiny policy in however many processes it is started in; for the tests of several
processes.

    torchrun --nproc_per_node 2 -m tests.one_update OUT
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer_kit import letter_tokenizer, rollout, tiny_llama
from trainer.advantage import TokenAdvantages, pad_rows, token_advantages
from trainer.config import GenerationConfig, RLConfig
from trainer.engine_generate import GenerateSampler
from trainer.sampler import Rollout
from trainer.update import Passes, accumulate_gradients, update_policy
from trainer.world import World

#: Tokens of prompt and completion: three micro-batches of `CONFIG`, which two processes cannot
#: share evenly.
LENGTHS = [(2, 3), (4, 1), (3, 6), (2, 2), (5, 4)]
PROMPTS = [[3, 4, 2], [5, 2], [6, 6, 6, 2], [7, 8, 2]]
#: loss_mean, and whether no process holds all weights.
CASES = [("token", False), ("sequence", False), ("token", True)]


def config(loss_mean: str) -> RLConfig:
    """Two passes of two steps, with every term of the loss."""
    return RLConfig(
        loss_mean=loss_mean,  # type: ignore[arg-type]
        micro_batch_tokens=16,
        minibatches=2,
        entropy_coef=0.01,
        kl_coef=0.1,
    )


def batch() -> tuple[list[Rollout], TokenAdvantages]:
    """Rollouts and advantages, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def numbers(n: int) -> list[float]:
        return (torch.rand(n, generator=generator) - 2.5).tolist()

    def ids(n: int) -> list[int]:
        return torch.randint(3, 11, (n,), generator=generator).tolist()

    rollouts = [
        rollout(ids(p), ids(t), old_logprobs=numbers(t), ref_logprobs=numbers(t))
        for p, t in LENGTHS
    ]
    mask_BT = pad_rows([[True] * t for _, t in LENGTHS], torch.bool)
    tokens_BT = pad_rows([numbers(t) for _, t in LENGTHS])
    rewards_B = torch.tensor(numbers(len(LENGTHS)))
    return rollouts, token_advantages(rewards_B, tokens_BT, mask_BT, range(len(LENGTHS)))


def update(world: World, loss_mean: str = "token", *, shard: bool = False) -> dict[str, Any]:
    """The gradients of a pass, the weights after an update, its figures, and greedy completions
    of `PROMPTS` under those weights; whole on every process."""
    plain, tokenizer = tiny_llama(letter_tokenizer()), letter_tokenizer()
    plain.generation_config.eos_token_id = [1, 5]  # so that some end before others
    if shard:
        model, optimizer = _sharded(plain)
    else:
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        model, optimizer = world.accelerator.prepare(plain, optimizer)
    cfg, (rollouts, advantages) = config(loss_mean), batch()
    accumulate_gradients(rollouts, advantages, range(5), Passes(model, cfg, world))
    gradients = {name: _whole(p.grad) for name, p in plain.named_parameters()}
    stats = update_policy(
        rollouts, advantages, optimizer, cfg, policy_model=model, temperature=1.0, pad_id=0,
        world=world,
    )  # fmt: skip
    weights = {name: _whole(p) for name, p in plain.named_parameters()}
    sampler = GenerateSampler(model, tokenizer, many_processes=shard and world.size > 1)
    greedy = GenerationConfig(temperature=0, num_samples_per_prompt=1, max_new_tokens=8)
    places, prompts = zip(*world.share(PROMPTS), strict=True)
    sampled = sampler.sample(prompts, greedy, with_logprobs=False)
    completions = world.gather([(places[i], one[0].token_ids) for i, one in sampled])
    return {
        "gradients": gradients,
        "weights": weights,
        "figures": asdict(stats),
        "completions": [ids for _, ids in sorted(completions)],
    }


def _sharded(model: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As accelerate's FSDP2 does, which it refuses on CPUs: each layer, then what is left."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _whole(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def main() -> None:
    """Rank 0 writes what `update` gives for each of `CASES`."""
    world = World(torch.device("cpu"))
    found = [update(world, loss_mean, shard=shard) for loss_mean, shard in CASES]
    if world.is_main:
        torch.save({"processes": world.size, "found": found}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
