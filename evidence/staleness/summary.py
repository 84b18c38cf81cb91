"""Computes the stats of bench/results/staleness.json from the files of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.translation import summary as translation
from evidence.translation.arms import Plan
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of

#: Keys of log.jsonl whose mean over the updates is reported.
LOGGED = (
    "staleness_mean",
    "sampler_gap_mean",
    "importance_weight_mean",
    "importance_capped_frac",
    "importance_masked_frac",
    "clip_frac",
    "reward_coverage",
)


def summarise(plan: Plan) -> dict[str, Any]:
    """Return the stats of all runs that were trained and measured, with those of the ages."""
    results = translation.summarise(plan)
    for run in results["runs"]:
        log = read_jsonl(plan.folder / f"{run['arm']}-{run['seed']}" / "log.jsonl")
        run["staleness"] = staleness_of(log)
    return results


def staleness_of(log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ages and importance weights of a run.

    Each mean is over the updates that have the value. `capped_max` and `masked_max` are shares of
    the worst update. `updates_by_age`: how many updates learned from samples of each mean age.
    """
    ages = [line["staleness_mean"] for line in log]
    counted = sorted({age for age in ages if age is not None})
    return {
        **{key: mean_of([x[key] for x in log if x[key] is not None]) for key in LOGGED},
        "staleness_max": _largest(log, "staleness_max"),
        "capped_max": _largest(log, "importance_capped_frac"),
        "masked_max": _largest(log, "importance_masked_frac"),
        "dropped_stale": sum(line["dropped_stale"] for line in log),
        "updates_by_age": {f"{age:g}": ages.count(age) for age in counted},
    }


def _largest(log: Sequence[Mapping[str, Any]], key: str) -> Any:
    return max((line[key] for line in log if line[key] is not None), default=None)
