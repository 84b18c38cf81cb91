"""The control: `python -m evidence.roleplay.control ARGS` is `python -m trainer ARGS`, but in
training each reply gets the reward of another one.

All five values of a reply go to the same other reply of the batch, which has another prompt. So
rewards keep their distribution and their cost, but do not depend on the text. Evaluations use the
true rewards: they call the formulas, not the functions that TRL gets.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scorekit.command import run_command

Function = Callable[..., list[float]]


def dealt(prompts: Sequence[Any], seed: int) -> list[int]:
    """Return for each reply the index of the reply whose values it gets.

    It belongs to another prompt if there is one. The result is the same for the same prompts.
    """
    names = [str(prompt) for prompt in prompts]
    chance = random.Random(f"{seed} {names}")
    return [
        chance.choice([k for k, other in enumerate(names) if other != prompt_name] or [index])
        for index, prompt_name in enumerate(names)
    ]


def shuffled(function: Function, seed: int) -> Function:
    """Return a reward function whose values are dealt to other replies."""

    @functools.wraps(function)
    def other(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        values = function(prompts, completions, **columns)
        return [values[index] for index in dealt(prompts, seed)]

    return other


def main() -> None:
    """Exchange the rewards and run the trainer."""
    from trainer.roleplay import rewards

    rewards.REWARDS = tuple(
        replace(reward, function=shuffled(reward.function, 1)) for reward in rewards.REWARDS
    )
    from trainer.__main__ import app

    app()


if __name__ == "__main__":
    run_command(main, stdout="log")
