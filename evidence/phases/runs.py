"""The runs: phase 1, phase 2 from what phase 1 left, and a control of each.

A control has the same settings, start and seed, but the rewards of an update are dealt out among
all of its episodes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, WORK
from demo.search.measured_sets import HELD_OUT, SETS
from evidence.search.arms import COMMON, POLICY, YARDSTICK, Dealt
from evidence.search.runs import measure_policy
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.runs.checkpoints.checkpoint import checkpoints
from trainer.search.config import SearchConfig

FOLDER = ROOT / "runs/phases_evidence"
SEEDS = (1, 2, 3, 4, 5)
CONFIGS = {number: ROOT / f"configs/search/demo_phase{number}.yaml" for number in (1, 2)}
#: How every policy is measured: by the episodes of the demo's phase 2.
MEASURED_BY = CONFIGS[2]
START = "start"


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes a training.

    phase: whose config.
    start: the arm that it goes on from.

    dealt: how rewards are exchanged between episodes.
    """

    title: str
    phase: int
    start: str = START
    dealt: Dealt | None = None


ARMS = {
    "phase1": Arm("phase 1", 1),
    "phase1-shuffled": Arm("control: phase 1, shuffled", 1, dealt="chance"),
    "phase2": Arm("phase 2, from phase 1", 2, "phase1"),
    "phase2-shuffled": Arm("control: phase 2 from phase 1, shuffled", 2, "phase1", "chance"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes what is run.

    settings: for a small run.
    limit: of the questions of each set.
    """

    folder: Path = FOLDER
    seeds: tuple[int, ...] = SEEDS
    settings: tuple[str, ...] = ()
    sets: tuple[str, ...] = tuple(SETS)
    limit: int | None = None

    def path(self, arm: str, seed: int) -> Path:
        """Return the folder of a run; all seeds have one start."""
        return self.folder / (START if arm == START else f"{arm}-{seed}")

    def measured(self, arm: str, seed: int, set_name: str) -> Path:
        """Return the file of a run's measurement."""
        return self.path(arm, seed) / f"{set_name}.jsonl"

    def policy(self, arm: str, seed: int) -> Path:
        """Return the policy that an arm left. Raises UserError if there is none."""
        if arm == START:
            return POLICY
        policy = next(iter(checkpoints(self.path(arm, seed) / "train/checkpoints")), None)
        if policy is None:
            raise UserError(f"{self.path(arm, seed)}: no checkpoint; remove it to train anew")
        return policy


def make_plan(quick: bool, seeds: Sequence[int]) -> Plan:
    """Return the plan. A quick one tries two updates, and keeps away from the final test."""
    if not quick:
        return Plan(seeds=tuple(seeds) or SEEDS)
    small = ("rl.num_updates=2", "rl.batch_size=2", "rollout.n_agent=4")
    return Plan(WORK / "phases_evidence", (tuple(seeds) or SEEDS)[:1], small, (HELD_OUT,), 6)


def run(plan: Plan, name: str, seed: int, services: dict[str, Sequence[str]]) -> float:
    """Train and measure what is missing of a run, and return the seconds.

    services: by set, the settings that name its services. The start is only measured.
    """
    started = time.monotonic()
    path = plan.path(name, seed)
    done = path / "run.json"
    if name != START and not done.is_file():
        shutil.rmtree(path, ignore_errors=True)
        record = train(plan, name, seed, services[HELD_OUT])
        write_atomic(done, json.dumps({"settings": record, "s": time.monotonic() - started}))
    path.mkdir(parents=True, exist_ok=True)
    for set_name in plan.sets:
        out = plan.measured(name, seed, set_name)
        if not out.is_file():
            settings = [*YARDSTICK, *services[set_name]]
            policy, questions = plan.policy(name, seed), SETS[set_name].questions
            measure_policy(MEASURED_BY, settings, policy, questions, out, plan.limit)
    return time.monotonic() - started


def train(plan: Plan, name: str, seed: int, services: Sequence[str]) -> list[str]:
    """Train an arm, and return its settings. Raises UserError if the training ends early."""
    from evidence.search.control import dealing
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search

    arm, path = ARMS[name], plan.path(name, seed)
    settings = [*COMMON, *plan.settings, f"misc.seed={seed}"]
    paths = [f"misc.run_dir={path / 'train'}", f"policy.path={plan.policy(arm.start, seed)}"]
    cfg = load_config(SearchConfig, CONFIGS[arm.phase], [*settings, *services, *paths])
    with dealing(arm.dealt):
        artifacts = run_search(load_train(cfg), {}, cfg)
    if artifacts.stopped or artifacts.checkpoint is None:
        raise UserError(f"{name}, seed {seed}: {artifacts.stopped or 'no checkpoint'}")
    for state in path.glob("train/checkpoints/*/optimizer*"):
        state.unlink()
    return settings
