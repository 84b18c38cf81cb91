"""Check the form of the turns of an episode."""

from __future__ import annotations

from trainer.search.records import Trajectory


def format_error(trajectory: Trajectory) -> str | None:
    """Return the first format error of an episode as `turn N: reason`, or None.

    Every turn that the policy wrote counts: an invalid action (a wrong form, or a box outside the
    image) is an error. A forced turn or a forced end is not.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced]
    if not turns:
        return "no turn"
    for turn in turns:
        if turn.action == "invalid":
            return f"turn {turn.number}: {turn.reason}"
        if turn.action == "complete" and turn is not turns[-1]:
            return f"turn {turn.number}: the episode went on behind its end"
    return None
