"""Convert the arguments of `update_policy`, in any of their forms, to what the update needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trainer.rl.advantage import TokenAdvantages, pad_rows
from trainer.rl.rollout import Rollout, RolloutBatch, action_masks

#: Advantages with their masks, or one number for each completion token: [B, T] with anything behind
#: the end of a row, or B rows of T_i.
Advantages: TypeAlias = TokenAdvantages | Tensor | Sequence[Sequence[float]]


def as_token_advantages(advantages: Advantages, rollouts: Sequence[Rollout]) -> TokenAdvantages:
    """Return advantages with masks. Bare numbers train every token that the policy sampled.

    Raises ValueError if they are not one finite number for each completion token.
    """
    if isinstance(advantages, TokenAdvantages):
        _check_shape(advantages.values, rollouts)
        return advantages
    mask_BT = action_masks(rollouts)
    if isinstance(advantages, Tensor):
        _check_shape(advantages, rollouts)
        values_BT = advantages.detach().to("cpu", torch.float64)
    else:
        rows = list(advantages)
        if len(rows) != len(rollouts):
            raise ValueError(f"advantages: {len(rows)} rows for {len(rollouts)} rollouts")
        for row, rollout in zip(rows, rollouts, strict=True):
            if len(row) != len(rollout.completion_token_ids):
                raise ValueError(
                    f"advantages: {len(row)} numbers for {len(rollout.completion_token_ids)} "
                    f"completion tokens of {rollout.name}"
                )
        values_BT = pad_rows(rows)
    values_BT = values_BT.masked_fill(~mask_BT, 0.0)
    if not bool(values_BT.isfinite().all()):
        raise ValueError("advantages: a number is NaN or infinite. Leave out its rollout")
    return TokenAdvantages(values_BT, values_BT, mask_BT)


def _check_shape(values: Tensor, rollouts: Sequence[Rollout]) -> None:
    longest = max((len(rollout.completion_token_ids) for rollout in rollouts), default=0)
    expected = [len(rollouts), longest]
    if list(values.shape) != expected:
        raise ValueError(f"advantages: shape {list(values.shape)}, the rollouts need {expected}")


def policy_of(
    rollouts: Sequence[Rollout], policy_model: nn.Module | None, optimizer: torch.optim.Optimizer
) -> nn.Module:
    """Return the model to update: the given one, else the one that sampled the rollouts.

    Raises ValueError if neither is known, or if the optimizer updates nothing of it.
    """
    if policy_model is None:
        if not isinstance(rollouts, RolloutBatch):
            raise ValueError(
                "policy_model: these rollouts do not say what sampled them (only the list of "
                "generate_rollouts does). Give policy_model and temperature"
            )
        policy_model = rollouts.policy_model
    updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if updated.isdisjoint(map(id, policy_model.parameters())):
        raise ValueError(
            "optimizer: it updates no parameter of the policy. Make it from the policy"
        )
    return policy_model


def temperature_of(rollouts: Sequence[Rollout], temperature: float | None) -> float:
    """Return the temperature of rollouts without their own. Raises ValueError if it is unknown."""
    if temperature is not None:
        return temperature
    if isinstance(rollouts, RolloutBatch):
        return rollouts.temperature
    if any(rollout.temperature is None for rollout in rollouts):
        raise ValueError("temperature: give the one that the rollouts were sampled at")
    return 1.0


def pad_id_of(rollouts: Sequence[Rollout], pad_id: int | None) -> int:
    """Return the id for padding; 0 if nobody says one: it is masked."""
    if pad_id is not None:
        return pad_id
    return rollouts.pad_id if isinstance(rollouts, RolloutBatch) else 0
