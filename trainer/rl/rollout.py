"""Rollouts: completions with the ids that were sampled, never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.rl.advantage import pad_rows
from trainer.rl.forward import Image, completion_logprobs, micro_batches
from trainer.rl.world import World


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What stands behind one prompt. The arrays have one entry for each completion token.

    group: its prompt's place among those of the batch (samples of one prompt share it).
    trajectory_id: of the episode that it is of, alone in its batch; "" where nobody has named it.
    completion_token_ids: as sampled, with the EOS where one came (finish_reason "eos"); in an
        episode of several turns, what the environment said in between, too.
    action_mask: True where the policy wrote; None: everywhere.
    old_logprobs: log-probabilities under the policy that sampled, at its temperature: log pi_old.
        Those of GSPO are made by the update, whatever stood here before (trainer/rl/update.py).
    sampler_logprobs: where old_logprobs were computed anew by the trainer, what the sampler had
        said, to correct for it; else None.
    ref_logprobs: the same under the reference; None without one.
    images: what prompt and completion show, in the order of their ids (trainer/rl/forward.py).
    Raises ValueError if the arrays differ in length.
    """

    group: int
    prompt_input_ids: list[int]
    completion_token_ids: list[int]
    finish_reason: Literal["eos", "length"]
    action_mask: list[bool] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    sampler_logprobs: list[float] | None = None
    images: Sequence[Image] = ()
    trajectory_id: str = ""

    def __post_init__(self) -> None:
        self.check_lengths("action_mask", "old_logprobs", "ref_logprobs", "sampler_logprobs")

    def check_lengths(self, *names: str) -> None:
        """Raise ValueError where one of these arrays has another length than the completion."""
        tokens = len(self.completion_token_ids)
        for name in names:
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"{self.name}: {len(values)} {name} for {tokens} completion tokens"
                )

    @property
    def name(self) -> str:
        """Of this one, in errors."""
        return f"trajectory {self.trajectory_id}" if self.trajectory_id else f"group {self.group}"

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_input_ids) + len(self.completion_token_ids)

    @property
    def actions(self) -> list[bool]:
        """`action_mask`, where there is none all True."""
        return self.action_mask or [True] * len(self.completion_token_ids)


def action_masks(rollouts: Sequence[Rollout]) -> Tensor:
    """True on the tokens that the policy wrote, [B, T]."""
    return pad_rows([rollout.actions for rollout in rollouts], torch.bool)


def logprob_rows(rollouts: Sequence[Rollout], name: str) -> Tensor:
    """`old_logprobs`, or another array of the rollouts, [B, T]. Raises ValueError where one has
    none."""
    for rollout in rollouts:
        if getattr(rollout, name) is None:
            raise ValueError(f"{rollout.name} has no {name}")
    return pad_rows([getattr(rollout, name) for rollout in rollouts], torch.float32)


@torch.no_grad()
def rollout_logprobs(
    rollouts: Sequence[Rollout],
    model: nn.Module,
    temperature: float,
    pad_id: int,
    micro_batch_tokens: int,
    world: World | None = None,
    *,
    never: Sequence[int] = (),
) -> list[list[float]]:
    """Log-probability of each completion token under `model`, by forward passes.

    never: ids that the sampler never draws.
    world: the processes that do this side by side, each with rollouts of its own, or none.
    """
    rows: list[list[float]] = [[] for _ in rollouts]
    batches = list(micro_batches([rollout.length for rollout in rollouts], micro_batch_tokens))
    if world is not None:
        model = world.reading(model)
        for _ in range(len(batches), world.most(len(batches))):
            batches.append([])
    for batch in batches:
        if not batch:  # the others still have passes to make, and need this one's weights
            completion_logprobs(model, [[pad_id]], [[pad_id]], temperature, pad_id)
            continue
        logprobs_BT, _, _ = completion_logprobs(
            model,
            [rollouts[index].prompt_input_ids for index in batch],
            [rollouts[index].completion_token_ids for index in batch],
            temperature,
            pad_id,
            images=[rollouts[index].images for index in batch],
            never=never,
        )
        for index, row in zip(batch, logprobs_BT.tolist(), strict=True):
            rows[index] = row[: len(rollouts[index].completion_token_ids)]
    return rows
