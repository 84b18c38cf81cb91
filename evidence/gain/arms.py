"""Defines the arms, their settings, and the order of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, WORK
from evidence.gain.data import DIRECTIONS, Direction

PPO_CONFIG = ROOT / "configs/translation/demo.yaml"
SFT_CONFIG = ROOT / "configs/best_of_n/demo.yaml"
TEMPERATURE = 0.8
#: A round of the start's SFT gains nothing if chrF ends less than this above the best so far.
LEAST_GAIN = 0.3
#: What every run changes in its config.
COMMON = (
    "data.eval=null",  # policies are measured afterwards, the control's by the true services
    "generation.max_new_tokens=32",
    f"generation.temperature={TEMPERATURE}",
    "generation.batch_size=256",
    "reward.no_eos_penalty=0",  # a true reward would be left to the control
    "reward.w_metricx=1",
    "reward.w_xcomet_seq=1",
    "reward.xcomet_seq_scale=25",  # the range of MetricX
    "reward.w_xcomet_span=0.1",
    "misc.dtype=bfloat16",
)


def folder_of(direction: Direction) -> Path:
    """Return the folder of a direction's start and trainings."""
    return ROOT / f"runs/gain{direction.suffix}"


def results_of(direction: Direction) -> Path:
    """Return the folder of a direction's results."""
    return ROOT / f"bench/results/gain{direction.suffix}"


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a run. They are the same for all seeds.

    prompts: sources to train on.
    updates: of PPO. PPO after best-of-n has half of them.
    batch: prompts of an update.
    samples: of a prompt, for PPO.
    several: samples of a prompt of which best-of-n takes one.
    epochs: of best-of-n SFT.
    steps: of continued SFT.
    limit: rows of a measured set at most.
    copies: samples of a source that are measured.
    """

    prompts: int = 500
    updates: int = 26
    batch: int = 16
    samples: int = 8
    several: int = 8
    epochs: float = 2.0
    steps: int = 170
    limit: int | None = None
    copies: int = 4


QUICK = Size(prompts=12, updates=2, batch=4, samples=2, several=2, steps=2, limit=6, copies=2)


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes one way to train.

    kind: its trainer: best_of_n (SFT) or ppo; none: a policy that was made with the start.
    settings: its changes. start: the arm whose result it starts from; None: the frozen start.
    shuffled: whether its rewards belong to other samples.
    temperature: of the samples that are measured; None: that of training.
    ends_later: whether its end of a text is made less likely, by END_BIAS.
    """

    title: str
    kind: str = "none"
    settings: tuple[str, ...] = ()
    start: str | None = None
    shuffled: bool = False
    temperature: float | None = None
    ends_later: bool = False


START = "start"
ROUND = "round"
COOLER = "cooler"
LONGER = "longer"
SFT = "sft"
SHUFFLED = "shuffled"
ARMS = {
    START: Arm("frozen start"),
    ROUND: Arm("the next round of the start's SFT"),
    COOLER: Arm("frozen start, sampled at temperature 0.6", temperature=0.6),
    LONGER: Arm("frozen start, ends later", ends_later=True),
    "ppo": Arm("PPO", "ppo"),
    "best-of-n": Arm("best of n + SFT pairs", "best_of_n", ("choice.by=reward", "pairs.share=0.5")),
    SFT: Arm("continued SFT", "best_of_n", ("pairs.share=1",)),
    SHUFFLED: Arm("PPO, shuffled (control)", "ppo", shuffled=True),
    "random": Arm("random of n + SFT pairs", "best_of_n", ("choice.by=random", "pairs.share=0.5")),
    "both": Arm("best of n, then PPO", "ppo", start="best-of-n"),
}


#: By direction, what LONGER takes off the logit of the end. It was chosen on the development set
#: so that the start's greedy translations get longer by as much as PPO's do on the test set: there
#: 0.918 -> 0.924 and 0.921 -> 0.997 times the references.
END_BIAS = {"en-ko": 0.25, "ko-en": 2.0}
#: Arms without which a seed is in no table; of the others a stop may leave fewer seeds.
CORE = ("ppo",)


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes what is run, in order.

    direction: what is translated.
    folder: of the trainings.
    results: of the JSON file of each run.
    start: folder with `policy`, `metricx` and `xcomet`.
    sets: names of the sets that are measured.
    """

    runs: tuple[tuple[str, int], ...]
    direction: Direction
    size: Size
    folder: Path
    results: Path
    start: Path
    sets: tuple[str, ...] = ("test", "tracked")

    @property
    def has_headroom(self) -> bool:
        """Return whether the headroom of the start is measured, too."""
        return "test" in self.sets


def make_plan(
    quick: bool = False,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    development: bool = False,
    size: Size | None = None,
    direction: Direction = DIRECTIONS["en-ko"],
) -> Plan:
    """Return a plan that goes seed by seed, so that a stop leaves a table with whole rows.

    The arm of CORE comes first, in all seeds: without three seeds of it nothing is shown.
    development: measure the development set alone, in a folder beside the others.
    """
    names = [name for name in ARMS if not only or name in only]
    start_runs = [(name, 0) for name in names if ARMS[name].kind == "none"]
    runs = [(name, seed) for seed in seeds for name in names if (name, 0) not in start_runs]
    runs = start_runs + sorted(runs, key=lambda run: run[0] not in CORE)
    start = folder_of(direction) / "start"
    if quick:
        folder = WORK / f"gain{direction.suffix}"
        runs = [run for run in runs if run[0] != ROUND]  # there is no curve of rounds
        models = ROOT / "demo/models"
        return Plan(tuple(runs), direction, size or QUICK, folder, folder / "results", models)
    folder, results = folder_of(direction), results_of(direction)
    sets: tuple[str, ...] = ("test", "tracked")
    if development:
        folder = folder_of(direction) / "development"
        results, sets = folder / "results", ("development",)
    return Plan(tuple(runs), direction, size or Size(), folder, results, start, sets)


def overrides(name: str, seed: int, plan: Plan, policy: Path) -> list[str]:
    """Return the `--set` values of a run. policy: the folder of what it starts from."""
    arm, size, sets = ARMS[name], plan.size, plan.folder / "sets"
    if arm.kind == "none":
        cooler = [] if arm.temperature is None else [f"generation.temperature={arm.temperature}"]
        later = [f"end_bias={END_BIAS[plan.direction.name]}"] if arm.ends_later else []
        return [*COMMON, f"policy.path={policy}", *cooler, *later]
    settings = [*COMMON, f"misc.seed={seed}", f"misc.run_dir={plan.folder}/{name}-{seed}"]
    settings += [f"policy.path={policy}", f"data.train={sets}/train.jsonl"]
    if arm.kind == "ppo":
        updates = size.updates if arm.start is None else size.updates // 2
        settings += [
            f"generation.num_samples_per_prompt={size.samples}",
            f"rl.num_updates={updates}",
            f"rl.batch_size={size.batch}",
            f"rl.warmup_updates={min(3, updates - 1)}",
            "rl.micro_batch_tokens=4096",
            "rl.center_groups=true",
            'rl.importance_correction="off"',
            "misc.matmul=auto",
            "misc.save_every_n_updates=0",
            "misc.dump_every_n_updates=0",
            "misc.overwrite=true",
        ]
    else:
        # One sample chosen at random is the same whatever their number.
        several = 2 if "choice.by=random" in arm.settings else size.several
        settings += [
            f"generation.num_samples_per_prompt={several}",
            f"pairs.path={sets}/pairs.jsonl",
            f"sft.num_train_epochs={size.epochs}",
            "misc.save_every_n_updates=0",
        ]
        if name == SFT:
            settings.append(f"sft.max_steps={size.steps}")
    return [*settings, *arm.settings]
