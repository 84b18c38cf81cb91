"""Defines the runs: rewards, losses, and controls. An arm differs from `both` in one thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.common import ROOT, WORK
from demo.search.measured_sets import HELD_OUT, SETS

RUNS = ROOT / "runs/search_evidence"
CONFIG = ROOT / "evidence/search/settings.yaml"
POLICY = ROOT / "demo/models/search_policy"
SEEDS = (1, 2, 3)
UPDATES = 12
#: What every run changes in CONFIG.
COMMON = (
    "data.eval=null",  # all policies are measured afterwards, by one yardstick
    "stop.skipped_updates=null",  # a policy that earns nothing has its budget, too
    "misc.save_every_n_updates=0",
    "misc.dump_every_n_updates=0",
    "misc.threads=1",
)
#: How every policy is measured, whatever it was trained on.
YARDSTICK = ("reward.preset=phase2", "reward.forced_completion=score", "eval.temperature=0")

Dealt = Literal["chance", "row"]
Start = Literal["warm", "random"]
Knowledge = Literal["nothing", "half"]


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes what an arm rewards.

    settings: changes to COMMON.
    first: further settings of a first stage, which gets half of the updates.
    dealt: how rewards are exchanged between episodes.
    start: the first weights.
    knows: what the generator knows without any image.
    further: run after all seeds of the others.
    """

    title: str
    settings: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    dealt: Dealt | None = None
    start: Start = "warm"
    knows: Knowledge = "nothing"
    further: bool = False

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Return the settings of each training, in order. Each continues the one before."""
        return ((*self.settings, *self.first), self.settings) if self.first else (self.settings,)

    @property
    def start_name(self) -> str:
        """Return the name of the measurement that this arm is compared with."""
        return f"start-{self.start}-{self.knows}"


JUDGE_ONLY = ("reward.preset=focused",)
#: The arm that no other may fail to beat: its rewards belong to other episodes.
CONTROL = "shuffled"
#: The generator is asked about an episode without any page, too: what it knows counts.
UNGUARDED = ("answering.judge.no_evidence=ask",)
ARMS = {
    "both": Arm("both rewards"),
    "ndcg": Arm("NDCG only", ("reward.w_judge=0", "reward.w_ndcg=1")),
    "judge": Arm("judge only", JUDGE_ONLY),
    "forced-zero": Arm("both, a forced end earns 0", ("reward.forced_completion=zero",)),
    "ppo": Arm(
        "both, PPO's token clip",
        ("rl.algorithm=ppo", "rl.clip_eps=0.2", "rl.loss_mean=sequence"),
    ),
    "shuffled": Arm("control: both, shuffled", dealt="chance"),
    "rows": Arm("control: both, joined by row", dealt="row"),
    "random": Arm("control: both, no warm start", start="random"),
    "phases": Arm("phase 1, then phase 2", first=("reward.preset=phase1",), further=True),
    "knows-both": Arm("both, the generator knows half", UNGUARDED, knows="half", further=True),
    "knows-judge": Arm(
        "judge only, it knows half", (*UNGUARDED, *JUDGE_ONLY), knows="half", further=True
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes what is run.

    settings: changes to COMMON for a small run.
    limit: number of questions of each of the `sets`.
    """

    runs: tuple[tuple[str, int], ...]
    folder: Path
    policy: Path
    updates: int = UPDATES
    limit: int | None = None
    settings: tuple[str, ...] = ()
    sets: tuple[str, ...] = tuple(SETS)


def make_plan(quick: bool, only: Sequence[str], seeds: Sequence[int], policy: Path) -> Plan:
    """Return a plan with one seed of every arm first, so that the first runs are useful alone.

    A quick plan is for trying things, so it does not use the final test.
    """
    names = [name for name in ARMS if not only or name in only]
    if quick:
        selected = tuple((name, seeds[0]) for name in (names if only else ("both", "rows")))
        small = ("rl.batch_size=3", "rollout.n_agent=4")
        return Plan(selected, WORK / "search_evidence", policy, 2, 6, small, (HELD_OUT,))
    runs = [(name, seed) for seed in seeds for name in names]
    return Plan(tuple(sorted(runs, key=lambda run: ARMS[run[0]].further)), RUNS, policy)
