"""Advantages of tokens from sequence and token rewards, for trainers of other projects.

The formulas are those of the project's own trainer (arXiv 2601.09012, section 4; GRPO: arXiv
2402.03300, section 4.1.2), on plain lists, in float64.

Shapes: B samples, T tokens of each (rows may differ in length).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, count
from typing import Any, Literal

from scorekit.credit.checks import as_plain, check_choice, check_flag, is_finite

AdvantageNorm = Literal["batch", "group", "grpo"]


def compute_advantages(
    rewards: Sequence[float | None],
    token_rewards: Sequence[Sequence[float]],
    valid: Sequence[Sequence[bool]],
    groups: Sequence[Hashable],
    *,
    norm: AdvantageNorm = "batch",
    center: bool = False,
    eps: float = 1e-8,
) -> list[list[float]]:
    """Return the advantage of each token, [B, T]: 0 where `valid` is False.

    rewards: [B] sequence reward; None: the sample has no reward. Its advantages are 0, and no mean
    or deviation counts it.
    token_rewards: [B, T] rewards that are added on single tokens.
    valid: [B, T] tokens to train on.
    groups: [B] the prompt of each sample.
    norm: `batch`: (A - mean) / (deviation + eps) over all valid tokens; `group`: over those of each
    prompt; `grpo`: the sequence rewards of each prompt are normalized (n - 1 in the deviation), and
    the token rewards added unchanged.
    center: subtract the mean sequence reward of a prompt first.
    Tensors and arrays are taken as lists.
    Raises ValueError for an unknown `norm`, for flags that are no bool, for a number that is not
    finite or too large to compute with, and for lists or rows of different lengths.
    """
    check_choice("norm", norm, AdvantageNorm)
    check_flag("center", center)
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"eps: {eps!r} is no finite number of at least 0. Correct it")
    rewards, groups = list(as_plain(rewards)), _as_groups(groups)
    token_rewards = [list(as_plain(row)) for row in as_plain(token_rewards)]
    valid = [list(as_plain(row)) for row in as_plain(valid)]
    _check_lengths(rewards, token_rewards=token_rewards, valid=valid, groups=groups)
    _check_flags(valid)
    for index, (row, flags) in enumerate(zip(token_rewards, valid, strict=True)):
        if len(row) != len(flags):
            raise ValueError(
                f"sample {index}: {len(row)} token rewards, but {len(flags)} values of valid"
            )
    try:
        _check_finite(rewards, token_rewards)
        advantages = _advantages(rewards, token_rewards, valid, groups, norm, center, eps)
    except (OverflowError, ZeroDivisionError):  # a deviation of 0 by rounding, and eps 0
        advantages = [[math.nan]]
    if not all(all(map(math.isfinite, row)) for row in advantages):
        raise ValueError("the rewards are too large, or too close to 0 for this eps, to compute")
    return advantages


def _as_groups(groups: Iterable[Hashable]) -> list[Hashable]:
    """Return the groups as values that are equal for equal prompts. Raises ValueError."""
    values = [as_plain(group) for group in as_plain(groups)]
    for index, group in enumerate(values):
        if not isinstance(group, Hashable) or group != group:
            raise ValueError(f"groups[{index}]: {group!r} is no name of a prompt. Give an id")
    return values


def _check_flags(valid: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError for what is neither True nor False, such as the -100 of labels."""
    for index, row in enumerate(valid):
        if row.count(True) + row.count(False) == len(row):
            continue
        for token, flag in enumerate(row):
            if flag not in (0, 1):
                raise ValueError(
                    f"valid[{index}][{token}]: {flag!r} is no bool. Give True or False"
                )


def _check_lengths(rewards: Sequence[Any], **lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if len(values) != len(rewards):
            raise ValueError(f"{name}: {len(values)} of them for {len(rewards)} rewards")


def _advantages(
    rewards: Sequence[float | None],
    token_rewards: Sequence[Sequence[float]],
    valid: Sequence[Sequence[bool]],
    groups: Sequence[Hashable],
    norm: AdvantageNorm,
    center: bool,
    eps: float,
) -> list[list[float]]:
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    rewards_by_sample = {index: float(rewards[index] or 0.0) for index in scored}
    members: dict[Hashable, list[int]] = {}
    for index in scored:
        members.setdefault(groups[index], []).append(index)
    if center:
        for indices in members.values():
            mean = math.fsum(rewards_by_sample[index] for index in indices) / len(indices)
            rewards_by_sample |= {index: rewards_by_sample[index] - mean for index in indices}
    advantages = [[0.0] * len(row) for row in valid]
    if norm == "grpo":
        for indices in members.values():
            scores = _group_scores([rewards_by_sample[index] for index in indices], eps)
            rewards_by_sample |= zip(indices, scores, strict=True)
    values = _add_up(rewards_by_sample, token_rewards, valid)
    batches = {"batch": [scored], "group": list(members.values()), "grpo": []}
    for indices in batches[norm]:
        _normalize([values[index] for index in indices], eps)
    for index, row in values.items():
        for token, value in zip(compress(count(), valid[index]), row, strict=False):
            advantages[index][token] = value
    return advantages


def _check_finite(
    rewards: Sequence[float | None], token_rewards: Sequence[Sequence[float]]
) -> None:
    for index, (reward, row) in enumerate(zip(rewards, token_rewards, strict=True)):
        if reward is not None and not all(map(math.isfinite, [reward, *row])):
            raise ValueError(f"sample {index}: its rewards are not finite. Give None for no reward")


def _add_up(
    rewards_by_sample: dict[int, float],
    token_rewards: Sequence[Sequence[float]],
    valid: Sequence[Sequence[bool]],
) -> dict[int, list[float]]:
    """Return sequence reward plus token reward of the valid tokens, by sample."""
    return {
        index: [reward + value for value in compress(token_rewards[index], valid[index])]
        for index, reward in rewards_by_sample.items()
    }


def _normalize(rows: Sequence[list[float]], eps: float) -> None:
    """Normalize all values of the rows in place; equal values become exactly 0."""
    mean, deviation, is_constant = _moments([value for row in rows for value in row], 0)
    for row in rows:
        row[:] = [0.0 if is_constant else (value - mean) / (deviation + eps) for value in row]


def _group_scores(rewards: Sequence[float], eps: float) -> list[float]:
    mean, deviation, is_constant = _moments(rewards, 1)
    return [0.0 if is_constant else (reward - mean) / (deviation + eps) for reward in rewards]


def _moments(values: Iterable[float], correction: int) -> tuple[float, float, bool]:
    """Return mean and deviation, and whether all values are equal (then the deviation is 0)."""
    values = list(values)
    if not values or min(values) == max(values):
        return 0.0, 0.0, True
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - correction)
    return mean, math.sqrt(variance), False
