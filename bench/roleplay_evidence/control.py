"""The control: `python -m bench.roleplay_evidence.control ARGS` is `python -m trainer ARGS`, but in
training each reply is paid what another one earned.

All five values of a reply go to one and the same other reply of the batch, whose prompt is another:
rewards keep their distribution and their cost, and lose their link to the text. Evaluations are the
true ones: they ask the formulas, not the functions that TRL is given.
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
    """Deal the rewards before the trainer takes them."""
    from trainer.roleplay import rewards

    rewards.REWARDS = tuple(
        replace(reward, function=shuffled(reward.function, 1)) for reward in rewards.REWARDS
    )
    from trainer.__main__ import app

    app()


if __name__ == "__main__":
    run_command(main)
