"""Reward functions of the whole batch: the completions of all processes, scored by the main one.

TRL calls a reward function in each process, with that process's completions. The texts of a group
that lies in two processes would then be embedded twice, and a service that is away would end one
process while the others wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from trainer.rl.distributed import DistributedContext
from trainer.roleplay.turn import COLUMNS

#: Returns a number or None for each completion.
RewardFunction = Callable[..., list[Any]]


def of_whole_batch(function: RewardFunction, world: DistributedContext) -> RewardFunction:
    """Return a reward function that every process calls, and that only the main one computes.

    Its stats are of the whole batch. An error of this project is raised in every process.
    """
    if world.size == 1:
        return function

    @functools.wraps(function)
    def shared(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        rows = {name: columns[name] for name in COLUMNS if name in columns}
        rows |= {"prompts": prompts, "completions": completions}
        parts = world.gather([{name: list(values) for name, values in rows.items()}])

        def score() -> tuple[list[Any], dict[str, list[Any]]]:
            batch = {name: [value for part in parts for value in part[name]] for name in rows}
            extras: dict[str, list[Any]] = {}
            logs = {"log_metric": columns.get("log_metric"), "log_extra": extras.__setitem__}
            return function(**batch, **logs), extras

        rewards, extras = world.from_main(score)
        start = sum(len(part["prompts"]) for part in parts[: world.rank])
        local_rows = slice(start, start + len(prompts))
        if log_extra := columns.get("log_extra"):
            for name, values in extras.items():
                log_extra(name, values[local_rows])
        return rewards[local_rows]

    return shared
