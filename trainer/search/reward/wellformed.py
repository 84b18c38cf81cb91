"""Whether an episode kept to the form of a turn, from its first to its last."""

from __future__ import annotations

from trainer.search.records import Trajectory


def format_fault(trajectory: Trajectory) -> str | None:
    """What is wrong with the form of an episode, as `turn N: reason`; None: nothing.

    Every turn that the policy wrote counts, the first as any other: an invalid action (of wrong
    form, or a box that is no part of the picture) is a fault. A turn that was put in its place is
    none of its own, and neither is an end that it did not choose.
    """
    own = [turn for turn in trajectory.turns if not turn.forced]
    if not own:
        return "no turn"
    for turn in own:
        if turn.action == "invalid":
            return f"turn {turn.number}: {turn.reason}"
        if turn.action == "complete" and turn is not own[-1]:
            return f"turn {turn.number}: the episode went on behind its end"
    return None
