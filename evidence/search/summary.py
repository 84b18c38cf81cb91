"""Computes the stats of bench/results/search_evidence.json from the files of the runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.search.arms import ARMS, Plan
from evidence.search.runs import measured_path, start_path
from scorekit.paired import paired_stat
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of

Line = Mapping[str, Any]

#: Of an episode, by `trainer/search/evaluation/stats.py`; whether more is better.
FIGURES: dict[str, bool | None] = {
    "reward_mean": True,
    "ndcg_mean": True,
    "judge_mean": True,
    "success_share": True,
    "success_without_evidence_share": False,
    "gold_seen_share": True,
    "turns_mean": None,
    "searches_mean": None,
    "crops_mean": None,
    "invalid_mean": False,
    "forced_share": False,
}
#: Of a line of the log, for the curves: what training sees, of its own questions.
LOGGED = ("reward_mean", "ndcg_mean", "clip_frac", "groups_without_spread")


def summarise(plan: Plan) -> dict[str, Any]:
    """Return the stats of all runs in the plan's folder, on each set."""
    return {
        "policy": plan.policy.name,
        "updates": plan.updates,
        "arms": {name: _trained(name, runs) for name in ARMS if (runs := _runs(plan.folder, name))},
        "sets": {
            set_name: set_results
            for set_name in plan.sets
            if (set_results := _measured(plan.folder, set_name))["starts"]
        },
    }


def _measured(folder: Path, set_name: str) -> dict[str, Any]:
    """Return the stats before and after training on one set, for all measured runs."""
    starts = {
        start: read_jsonl(path)
        for start in sorted({arm.start_name for arm in ARMS.values()})
        if (path := start_path(folder, start, set_name)).is_file()
    }
    paths = {
        name: [
            path for run in _runs(folder, name) if (path := measured_path(run, set_name)).is_file()
        ]
        for name in ARMS
    }
    ends = {
        name: list(map(read_jsonl, paths_of_arm))
        for name, paths_of_arm in paths.items()
        if paths_of_arm
    }
    first = next(iter(starts.values()), [])
    return {
        "questions": len({line["question"] for line in first}),
        "documents": sorted({line["document"] for line in first}),
        "episodes": len(first),
        "starts": {name: compute_stats(lines) for name, lines in starts.items()},
        "arms": {
            name: {"seeds": [_seed(path.parent) for path in paths[name]]}
            | _arm(name, starts[ARMS[name].start_name], lines, ends.get("both", []))
            for name, lines in ends.items()
        },
    }


def compute_stats(lines: Sequence[Line]) -> dict[str, Any]:
    """Return means over the episodes that have the value, and the reasons of invalid turns."""
    means: dict[str, Any] = {
        key: mean_of([line[key] for line in lines if line[key] is not None]) for key in FIGURES
    }
    reasons = Counter(reason for line in lines for reason in line["reasons"])
    return {**means, "invalid": dict(reasons.most_common())}


def changes(
    first: Sequence[Sequence[Line]], second: Sequence[Sequence[Line]]
) -> dict[str, dict[str, Any]]:
    """Compare each stat of the second runs with the first, with a 95 % interval.

    The bootstrap draws questions, each with all its episodes of all seeds. So the interval is for
    similar questions, and three seeds of one question do not count as three questions.
    """
    changes_by_key = {}
    for key, higher in FIGURES.items():
        questions = sorted({line["question"] for lines in (*first, *second) for line in lines})
        index_by_question = {question: index for index, question in enumerate(questions)}
        sums_N2S = np.zeros((len(questions), 2, 2))  # of values, and how many
        for policy, runs in enumerate((first, second)):
            for line in (line for lines in runs for line in lines):
                if line[key] is not None:
                    sums_N2S[index_by_question[line["question"]], policy] += (line[key], 1)
        both = sums_N2S[(sums_N2S[:, :, 1] > 0).all(axis=1)]
        pair_stats = paired_stat(key, key, both, len(questions) - len(both), _mean, higher)
        changes_by_key[key] = {
            "change": pair_stats.difference,
            "interval": None if pair_stats.low is None else [pair_stats.low, pair_stats.high],
            "verdict": pair_stats.verdict,
        }
    return changes_by_key


def _mean(sums: Any) -> float:
    return float(sums[0] / max(1.0, sums[1]))


def _trained(name: str, runs: Sequence[Path]) -> dict[str, Any]:
    logs = [_log(run) for run in runs]
    return {
        "title": ARMS[name].title,
        "start": ARMS[name].start_name,
        "settings": [list(stage) for stage in ARMS[name].stages],
        "seeds": list(map(_seed, runs)),
        "seconds": [json.loads((run / "run.json").read_text("utf-8"))["s"] for run in runs],
        "logged": {key: [[line.get(key) for line in log] for log in logs] for key in LOGGED},
    }


def _arm(
    name: str,
    start: Sequence[Line],
    ends: Sequence[Sequence[Line]],
    both: Sequence[Sequence[Line]],
) -> dict[str, Any]:
    of_start = compute_stats(start)
    arm_results = {
        "end": compute_stats([line for lines in ends for line in lines]),
        "of_seeds": [
            {key: _difference(of_start[key], compute_stats(lines)[key]) for key in FIGURES}
            for lines in ends
        ],
        "changes": changes([start], ends),
    }
    comparable = name != "both" and ARMS[name].knows == "nothing" and len(both) == len(ends)
    return arm_results | ({"against_both": changes(both, ends)} if comparable else {})


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else second - first


def _log(run: Path) -> list[dict[str, Any]]:
    stages = sorted(run.glob("stage-*/log.jsonl"))
    return [line for stage in stages for line in read_jsonl(stage)]


def _runs(folder: Path, name: str) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"{name}-[0-9]*/run.json"))


def _seed(run: Path) -> int:
    return int(run.name.rpartition("-")[2])
