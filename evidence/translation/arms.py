"""Defines the runs: arms, settings, order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, WORK

RUNS, RUNS_ON_OMISSIONS = ROOT / "runs/evidence", ROOT / "runs/evidence_omissions"
CONFIG = ROOT / "configs/translation/demo.yaml"
HELD_OUT = ROOT / "demo/data/final_test.jsonl"
UPDATES = 100
#: Checkpoints that are measured; the first ones of all runs before the others of any.
MEASURED = ((100,), (50,), (25, 75))
#: What every run changes in the demo's config.
COMMON = (
    "data.eval=null",  # checkpoints are measured afterwards, the control's by the true services
    "generation.max_new_tokens=24",
    "generation.batch_size=128",
    "eval.max_new_tokens=32",
    "reward.no_eos_penalty=0",  # a true reward would be left to the control
    "reward.w_metricx=1",
    "reward.w_xcomet_span=0.1",
    "rl.batch_size=8",
    "rl.center_groups=true",
    'rl.importance_correction="off"',
    "misc.dtype=bfloat16",
    "misc.dump_every_n_updates=0",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """Describes what an arm rewards.

    settings: changes to COMMON.
    w_metricx, w_span, w_omission: weights of its reward.
    ablation: one seed only.
    afterthought: added last, because of what the other runs showed.
    """

    title: str
    settings: tuple[str, ...] = ()
    w_metricx: float = 1.0
    w_span: float = 0.1
    w_omission: float = 0.0
    shuffled: bool = False
    ablation: bool = False
    afterthought: bool = False


def guards(weight: float) -> tuple[str, ...]:
    """Return every guard but `script`, which would repeat what `language` finds."""
    names = ("language", "copy", "length", "repetition")
    return tuple(f"reward.guards.w_{name}={weight:g}" for name in names)


SPANS = ("reward.w_metricx=0", "reward.w_xcomet_span=1")

ARMS = {
    "metricx": Arm("MetricX only", ("reward.w_xcomet_span=0",), w_span=0.0),
    "spans": Arm("spans only", SPANS, w_metricx=0.0, w_span=1.0),
    "both": Arm("both"),
    "shuffled": Arm("both, shuffled (control)", shuffled=True),
    "both-kl-off": Arm(
        "both, KL off",
        ("rl.kl_coef=0", "stop.kl_ceiling=1000000"),  # the ceiling: the KL is still logged
        ablation=True,
    ),
    "both-kl-large": Arm("both, KL 0.5", ("rl.kl_coef=0.5",), ablation=True),
    "both-guards": Arm("both, guards on", guards(5), ablation=True),
    "shuffled-metricx": Arm(
        "MetricX, shuffled",
        ("reward.w_xcomet_span=0",),
        w_span=0.0,
        shuffled=True,
        ablation=True,
        afterthought=True,
    ),
    "spans-guards": Arm(
        "spans only, guards on",
        (*SPANS, *guards(10)),
        w_metricx=0.0,
        w_span=1.0,
        ablation=True,
        afterthought=True,
    ),
    "spans-kl-large": Arm(
        "spans only, KL 0.5",
        (*SPANS, "rl.kl_coef=0.5"),
        w_metricx=0.0,
        w_span=1.0,
        ablation=True,
        afterthought=True,
    ),
}
#: A question of its own, in runs and results of its own: `--omissions`.
ON_OMISSIONS = {
    "spans-omissions": Arm(
        "spans and omissions",
        (*SPANS, "reward.w_omission=1"),
        w_metricx=0.0,
        w_span=1.0,
        w_omission=1.0,
    ),
    "spans": ARMS["spans"],
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes what is run.

    limit: number of held-out sources.
    arms: the arms by name.
    omissions: whether the stand-in judge that knows the reference reports them.
    """

    runs: tuple[tuple[str, int], ...]
    updates: int
    measured: tuple[tuple[int, ...], ...]
    limit: int | None
    folder: Path
    arms: Mapping[str, Arm]
    omissions: bool = False

    @property
    def settings(self) -> list[str]:
        """Return the changes of every run to the demo's config."""
        steps = [step for part in self.measured for step in part]
        return [
            *COMMON,
            f"rl.num_updates={self.updates}",
            f"rl.warmup_updates={min(3, self.updates - 1)}",
            f"misc.save_every_n_updates={min(steps)}",
            f"misc.keep_checkpoints={self.updates // min(steps)}",  # measured after all trainings
        ]


def make_plan(
    quick: bool, only: Sequence[str], seeds: Sequence[int], omissions: bool = False
) -> Plan:
    """Return a plan that is useful even if only its first runs finish: one seed of every arm
    comes first.
    """
    arms = ON_OMISSIONS if omissions else ARMS
    names = [name for name in arms if not only or name in only]
    first, *other_seeds = seeds
    runs = [(name, first) for name in names if not arms[name].afterthought]
    runs += [(name, seed) for seed in other_seeds for name in names if not arms[name].ablation]
    runs += [(name, first) for name in names if arms[name].afterthought]
    folder = RUNS_ON_OMISSIONS if omissions else RUNS
    if quick:
        folder = WORK / folder.name
        return Plan(tuple(runs[:4]), 2, ((1, 2),), 24, folder, arms, omissions)
    return Plan(tuple(runs), UPDATES, MEASURED, None, folder, arms, omissions)


def overrides(arm: Arm, seed: int, folder: Path, plan: Plan) -> list[str]:
    """Return the `--set` values of a run."""
    return [
        *plan.settings,
        *arm.settings,
        f"misc.seed={seed}",
        f"misc.run_dir={folder}",
        "misc.overwrite=true",
    ]
