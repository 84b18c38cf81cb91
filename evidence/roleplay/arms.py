"""Defines the runs: all five rewards, each left out, and rewards that belong to other replies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT
from trainer.roleplay.rewards import REWARDS

RUNS = ROOT / "runs/roleplay_evidence"
CONFIG = ROOT / "configs/roleplay/demo.yaml"
SEEDS = (1, 2, 3)
#: The arm in which all functions have their weights.
ALL = "all"
#: Turns with names that are in no training; nothing is trained or chosen on them.
UNSEEN_NAMES = ROOT / "demo/data/roleplay/unseen_names.jsonl"
#: Changes in the demo's config: every held-out turn.
COMMON = {"eval.eval_limit": "200"}


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes what an arm rewards.

    left_out: a function that gets no weight.
    """

    title: str
    left_out: str | None = None
    shuffled: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings besides COMMON."""
        return {} if self.left_out is None else {f"reward.weights.{self.left_out}": "0"}


ARMS = {
    ALL: Arm("all five"),
    "shuffled": Arm("all five, shuffled (control)", shuffled=True),
    **{
        f"without-{reward.short}": Arm(f"without {reward.title}", left_out=reward.name)
        for reward in REWARDS
    },
}


def order(names: list[str], seeds: list[int]) -> list[tuple[str, int]]:
    """Return the runs so that the first ones are useful alone: one seed of every arm first."""
    return [(name, seed) for seed in seeds for name in ARMS if not names or name in names]


def run_folder(folder: Path, name: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / f"{name}-{seed}"


def names_folder(folder: Path, seed: int | None) -> Path:
    """Return where a run with all functions, or the start (None), is measured on unseen names."""
    return folder / ("start-names" if seed is None else f"{ALL}-{seed}-names")
