"""The curation steps: a line for each, in the order of the commands' help.

From here come the commands, the sections of the config, and the steps of `search loop`. Nothing of
a step is imported before it is used.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple


class StepRow(NamedTuple):
    """A step.

    turn: its place in a round of the loop, the smallest first.
    target: "module:class" in this folder.
    help: the first sentence of the class."""

    turn: float
    target: str
    help: str


STEPS: Final[dict[str, StepRow]] = {
    "buckets": StepRow(
        4,
        "buckets:Buckets",
        "Sort questions: B mastered, A partly solved, 0 unsolved, or unscored.",
    ),
    "focus": StepRow(
        6,
        "focus:Focus",
        "Select the next round's data: hard and unsolved questions without bad ones.",
    ),
    "budget": StepRow(
        7, "budget:Budget", "Set max_turns and n_agent of each row from its earlier episodes."
    ),
    "verify": StepRow(
        5,
        "verify:Verify",
        "Check whether references are right, with a verifier, the generator and the judge.",
    ),
    "diagnose": StepRow(
        2,
        "diagnose:Diagnose",
        "Find out why prompts score low: a wrong search, answer or judgement, or an early end.",
    ),
    "alternatives": StepRow(
        1,
        "alternatives:Alternatives",
        "Find pages that carry the same fact as a gold page, and add them to the rows.",
    ),
    "hallucinations": StepRow(
        3,
        "hallucinations:Hallucinations",
        "Find the sources of right answers without gold evidence, with new calls.",
    ),
    "distill": StepRow(
        8,
        "distill:Distill",
        "Turn the rare right episodes of prompts that mostly fail into rows for `scorekit sft`.",
    ),
    "rewrite": StepRow(
        9,
        "rewrite:Rewrite",
        "Rewrite the thoughts of distilled rows with a model; their actions stay unchanged.",
    ),
}
#: The steps in the order of a round.
IN_ROUND: Final = tuple(sorted(STEPS, key=lambda name: STEPS[name].turn))


@cache
def step(name: str) -> Any:
    """Return a step of the table, a `Step`; this module imports none."""
    module, _, class_name = STEPS[name].target.partition(":")
    return getattr(import_module(f"trainer.search.steps.{module}"), class_name)()


def recording() -> list[str]:
    """Return the steps whose decisions are part of the record, in the order of a round."""
    return [name for name in IN_ROUND if step(name).records]
