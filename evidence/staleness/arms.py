"""Defines the runs: bounds on staleness, a mask, and the control at each bound."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common import ROOT, WORK
from evidence.translation.arms import Arm, Plan

RUNS = ROOT / "runs/staleness_evidence"
UPDATES = 24  # the demo's
#: Checkpoints that are measured; the ends of all runs before the others of any.
MEASURED = ((24,), (8, 16))
#: The arm that all others are compared with.
FRESH = "stale-0"


def _settings(max_staleness: int, *other: str) -> tuple[str, ...]:
    """Return the settings of a bound. The correction is the default in every arm."""
    bound = f"rl.max_staleness={max_staleness}"
    return ('rl.importance_correction="auto"', bound, *other)


#: Each arm has the demo's two rewards.
ARMS = {
    FRESH: Arm("max_staleness 0", _settings(0)),
    "stale-1": Arm("max_staleness 1", _settings(1)),
    "stale-4": Arm("max_staleness 4", _settings(4)),
    "stale-0-shuffled": Arm("0, shuffled (control)", _settings(0), shuffled=True),
    "stale-4-shuffled": Arm("4, shuffled (control)", _settings(4), shuffled=True),
    "stale-4-mask": Arm(
        "max_staleness 4, token_mask", _settings(4, "rl.importance_mode=token_mask")
    ),
    "stale-1-shuffled": Arm("1, shuffled (control)", _settings(1), shuffled=True),
}
#: These run after all seeds of the others.
LAST = ("stale-4-mask", "stale-1-shuffled")
#: Arm -> the arm with the same bound whose rewards mean nothing.
CONTROLS = {
    FRESH: "stale-0-shuffled",
    "stale-1": "stale-1-shuffled",
    "stale-4": "stale-4-shuffled",
    "stale-4-mask": "stale-4-shuffled",
}


def make_plan(quick: bool, only: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Return a plan with one seed of the main arms first, so that the first runs are useful alone.

    A quick plan has six updates, so that its last batch is four updates old.
    """
    names = [name for name in ARMS if not only or name in only]
    runs = [(name, seed) for seed in seeds for name in names]
    runs.sort(key=lambda run: run[0] in LAST)
    if quick:
        names = names if only else [FRESH, "stale-4", "stale-4-shuffled"]
        selected = tuple((name, seeds[0]) for name in names)
        return Plan(selected, 6, ((3, 6),), 24, WORK / RUNS.name, ARMS)
    return Plan(tuple(runs), UPDATES, MEASURED, None, RUNS, ARMS)
