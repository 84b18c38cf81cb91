"""Make replies as bad data has them: wrong level, role markers, the player acting, lost marks."""

from __future__ import annotations

import random

from demo.train.roleplay.grammar import Dialogue, Reply

#: Share of replies at the wrong speech level, whatever else is wrong with them.
WRONG_LEVEL = 0.3
#: What else is wrong: weights.
FAULTS = {"none": 40, "puppet": 14, "marker": 12, "no_quotes": 14, "swapped": 10, "tail": 10}
MARKERS = ("ASSISTANT: ", "USER: ", "SYSTEM: ", "assistant: ")


def noisy(reply: Reply, rng: random.Random) -> str:
    """Return the reply's text with at most one error of form and, independently, one of level."""
    quote = reply.other_level if rng.random() < WRONG_LEVEL else reply.quote
    defect = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    if defect == "puppet":
        return f'{reply.puppet}\n"{quote}"'
    if defect == "marker":
        return f'{rng.choice(MARKERS)}{reply.narration}\n"{quote}"'
    if defect == "no_quotes":
        return f"{reply.narration}\n{quote}"
    if defect == "swapped":
        return f'"{quote}"\n{reply.narration}'
    if defect == "tail":
        return f'{reply.narration}\n"{quote}" 라고 말했다.'
    return f'{reply.narration}\n"{quote}"'


def noisy_replies(dialogue: Dialogue, rng: random.Random) -> list[str]:
    """Return every reply of a dialogue with noise."""
    return [noisy(reply, rng) for _, reply in dialogue.turns]
