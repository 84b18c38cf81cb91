"""Defines the runs: what an arm rewards, what all share, and the order of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.common import RESULTS, ROOT, WORK
from demo.search.answer_keys import FINAL_KEYS, KEYS
from demo.search.measured_sets import HELD_OUT, SETS, MeasuredSet
from demo.search.reading import CORPUS, FINAL_CORPUS
from evidence.search.new_documents import questions as new_documents

FOLDER = ROOT / "runs/search_evidence"
CONFIG = ROOT / "configs/search/demo_phase2.yaml"
POLICY = ROOT / "demo/models/search_policy"
SEEDS = (1, 2, 3, 4, 5, 6)
NEW = "new_documents"
MEASURED = {
    NEW: MeasuredSet(
        "new documents",
        new_documents.QUESTIONS,
        (CORPUS, FINAL_CORPUS),
        (KEYS, FINAL_KEYS, new_documents.KEYS),
        "_new",
    ),
    HELD_OUT: SETS[HELD_OUT],
}
#: What every run of evidence on search changes in its config.
COMMON = (
    "data.eval=null",  # all policies are measured afterwards, by one yardstick
    "stop.skipped_updates=null",  # a policy that earns nothing has its budget, too
    "misc.save_every_n_updates=0",
    "misc.dump_every_n_updates=0",
    "misc.threads=1",
)
#: How every policy is measured, whatever it was trained on: a forced end is scored like any other.
YARDSTICK = ("reward.preset=phase2", "reward.forced_completion=score", "eval.temperature=0")
#: What the arms of this page share beside COMMON. Chosen on the development set, by seed 1.
SETTINGS = (
    "data.train=demo/search/questions.jsonl",
    "reward.forced_completion=score",
    "rollout.deterministic=true",
    "rl.num_updates=8",
)
#: Steps of SFT: they take as many processor seconds as the updates of an arm.
SFT_STEPS = 90
SFT_EPISODES = 400

Dealt = Literal["chance", "group"]


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes one way to train.

    settings: its changes to SETTINGS.
    dealt: how the rewards of an update are exchanged between its episodes.
    kind: rl; sft, on scripted episodes as the start's; none, the start itself.
    later: run after all seeds of the others.
    """

    title: str
    settings: tuple[str, ...] = ()
    dealt: Dealt | None = None
    kind: Literal["rl", "sft", "none"] = "rl"
    later: bool = False


START = "start"
#: The arm that no other may fail to beat: its rewards belong to other episodes.
CONTROL = "shuffled"
SFT = "sft"
SLOW_SFT = "sft-slow"
STOPPING = "stopping"
ARMS = {
    START: Arm("the start", kind="none"),
    "both": Arm("both rewards"),
    CONTROL: Arm("control: both, shuffled", dealt="chance"),
    SFT: Arm("SFT on scripted episodes, similar time", kind="sft"),
    SLOW_SFT: Arm("SFT, a tenth of the learning rate", ("--rate=1e-4",), kind="sft", later=True),
    "judge": Arm("judge only", ("reward.preset=focused",), later=True),
    "ndcg": Arm("NDCG only", ("reward.w_judge=0", "reward.w_ndcg=1"), later=True),
    STOPPING: Arm(
        "both rewards, a forced end costs 0.3, 14 updates",
        ("reward.forced_completion=penalty", "rl.num_updates=14"),
        later=True,
    ),
    "shuffled-group": Arm("control: shuffled within a question", dealt="group", later=True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes what is run, in order.

    folder: of the trainings.
    results: of the JSON file of each run.
    settings: changes for a small run.
    limit: of the questions of each set.
    """

    runs: tuple[tuple[str, int], ...]
    folder: Path = FOLDER
    results: Path = RESULTS / "search"
    sets: tuple[str, ...] = (NEW,)
    settings: tuple[str, ...] = ()
    sft: tuple[int, int] = (SFT_STEPS, SFT_EPISODES)
    limit: int | None = None


def make_plan(
    quick: bool = False,
    only: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    *,
    development: bool = False,
) -> Plan:
    """Return a plan that goes seed by seed, so that a stop leaves whole rows.

    quick: a small one, for trying things.
    development: measure the development set alone. Neither of the two touches the new documents.
    """
    names = [name for name in ARMS if not only or name in only]
    runs = [(name, seed) for seed in seeds for name in names if ARMS[name].kind != "none"]
    runs.sort(key=lambda run: ARMS[run[0]].later)
    runs = [(name, 0) for name in names if ARMS[name].kind == "none"] + runs
    if quick:
        small = ("rl.num_updates=2", "rl.batch_size=2", "rollout.n_agent=4")
        folder = WORK / "search"
        runs = runs if only else [run for run in runs if run[0] in (START, "both", SFT)]
        first = tuple(run for run in runs if run[1] in (0, seeds[0]))
        return Plan(first, folder, folder / "results", (HELD_OUT,), small, (2, 20), 3)
    if development:
        return Plan(tuple(runs), FOLDER, FOLDER / "development", (HELD_OUT,))
    return Plan(tuple(runs))


def settings_of(plan: Plan, name: str, seed: int) -> list[str]:
    """Return what a run changes in CONFIG, but for services and folders."""
    arm = ARMS[name]
    if arm.kind == "none":
        return []
    if arm.kind == "sft":
        steps, episodes = plan.sft
        sizes = [f"--episode-steps={steps}", f"--episodes={episodes}", f"--seed={seed}"]
        return [*sizes, *arm.settings]
    return [*COMMON, *SETTINGS, *plan.settings, *arm.settings, f"misc.seed={seed}"]
