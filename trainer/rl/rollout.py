"""Rollouts: completions with the ids that were sampled, never tokenized again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from trainer.rl.advantage import pad_rows
from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import Image, completion_logprobs, idle_pass, micro_batches


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One completion of a prompt. The arrays have one entry for each completion token.

    group: index of its prompt in the batch; samples of one prompt share it.
    trajectory_id: id of its episode, unique in the batch; "" if it has no name.
    completion_token_ids: as sampled, with the EOS if there is one (finish_reason "eos"); in an
    episode of several turns, also the observations between the turns.
    action_mask: True on tokens that the policy sampled; None: everywhere.
    temperature: that it was sampled at; None: the run's. All its log-probabilities are at it.
    old_logprobs: log-probabilities under the policy that sampled: log pi_old.
    With GSPO the update recomputes them (trainer/rl/update.py).
    sampler_logprobs: the sampler's own log-probabilities, if the trainer has recomputed
    old_logprobs, to correct for the difference; else None.
    ref_logprobs: log-probabilities under the reference model; None without one.
    weight_versions: the number of updates behind the weights that sampled each token; None if the
    sampler does not know. It says nothing on tokens that the policy did not sample.
    images: images of prompt and completion, in the order of their ids (trainer/rl/forward.py).
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
    weight_versions: list[int] | None = None
    images: Sequence[Image] = ()
    trajectory_id: str = ""
    temperature: float | None = None

    def __post_init__(self) -> None:
        self.check_lengths(
            "action_mask", "old_logprobs", "ref_logprobs", "sampler_logprobs", "weight_versions"
        )

    def check_lengths(self, *names: str) -> None:
        """Raise ValueError if one of these arrays has another length than the completion."""
        tokens = len(self.completion_token_ids)
        for name in names:
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"{self.name}: {len(values)} {name} for {tokens} completion tokens"
                )

    @property
    def name(self) -> str:
        """Return the name of this rollout in error messages."""
        return f"trajectory {self.trajectory_id}" if self.trajectory_id else f"group {self.group}"

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and completion."""
        return len(self.prompt_input_ids) + len(self.completion_token_ids)

    @property
    def actions(self) -> list[bool]:
        """Return `action_mask`, or all True without one."""
        return self.action_mask or [True] * len(self.completion_token_ids)


RolloutT = TypeVar("RolloutT", bound=Rollout)


class RolloutBatch(list[RolloutT], Generic[RolloutT]):
    """A list of rollouts that remembers what sampled it, so that `update_policy` need not be told.

    policy_model: the model that sampled.
    temperature: that it sampled at.
    pad_id: of the tokenizer. A slice, a copy and a pickle are plain lists: the model stays in its
    process.
    """

    def __init__(
        self,
        rollouts: Iterable[RolloutT],
        *,
        policy_model: nn.Module,
        temperature: float,
        pad_id: int,
    ) -> None:
        super().__init__(rollouts)
        self.policy_model = policy_model
        self.temperature = temperature
        self.pad_id = pad_id

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def action_masks(rollouts: Sequence[Rollout]) -> Tensor:
    """Return True on the tokens that the policy sampled, [B, T]."""
    return pad_rows([rollout.actions for rollout in rollouts], torch.bool)


def logprob_rows(rollouts: Sequence[Rollout], name: str) -> Tensor:
    """Return `old_logprobs`, or another array of the rollouts, as [B, T].

    Raises ValueError if a rollout has none.
    """
    for rollout in rollouts:
        if getattr(rollout, name) is None:
            raise ValueError(f"{rollout.name} has no {name}")
    return pad_rows([getattr(rollout, name) for rollout in rollouts], torch.float32)


def temperatures(rollouts: Sequence[Rollout], default: float) -> list[float]:
    """Return the temperature of each rollout.

    default: the run's.
    """
    return [default if row.temperature is None else row.temperature for row in rollouts]


@torch.no_grad()
def rollout_logprobs(
    rollouts: Sequence[Rollout],
    model: nn.Module,
    temperature: float,
    pad_id: int,
    micro_batch_tokens: int,
    world: DistributedContext | None = None,
    *,
    banned_token_ids: Sequence[int] = (),
) -> list[list[float]]:
    """Return the log-probability of each sampled token under `model`; 0 for the others.

    temperature: of rollouts without their own.
    banned_token_ids: ids that are never sampled.
    world: the processes that do this in parallel, each with its own rollouts; None: only this one.
    """
    rows: list[list[float]] = [[] for _ in rollouts]
    batches = list(micro_batches([rollout.length for rollout in rollouts], micro_batch_tokens))
    if world is not None:
        model = world.inference_model(model)
        for _ in range(len(batches), world.max_passes(len(batches))):
            batches.append([])
    for batch in batches:
        if not batch:  # other processes still have passes to make, and need this one's weights
            idle_pass(model, pad_id)
            continue
        chosen = [rollouts[index] for index in batch]
        logprobs_BT, _, _ = completion_logprobs(
            model,
            [rollout.prompt_input_ids for rollout in chosen],
            [rollout.completion_token_ids for rollout in chosen],
            temperatures(chosen, temperature),
            pad_id,
            actions=[rollout.actions for rollout in chosen],
            images=[rollout.images for rollout in chosen],
            banned_token_ids=banned_token_ids,
        )
        for index, row in zip(batch, logprobs_BT.tolist(), strict=True):
            rows[index] = row[: len(rollouts[index].completion_token_ids)]
    return rows
