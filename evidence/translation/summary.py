"""Computes the stats of bench/results/rl_evidence.json from the files of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evidence.translation.arms import HELD_OUT, Arm, Plan
from scorekit.paired import bootstrap_differences, paired_standard_error
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of
from trainer.translation.evaluation.compare import compare_policies, reference_stats

Line = Mapping[str, Any]

_LAST = 10  # updates whose mean KL is reported
#: Of the start policy's translations: a fault has this share of the letters at least, or the length
#: is at most this share of the reference's.
_UNTRANSLATED, _SHORT = 0.5, 0.6


def summarise(plan: Plan) -> dict[str, Any]:
    """Return the stats of all runs that were trained and measured."""
    start = _read(plan.folder / "start.json")
    sources = [line["rollout"]["src_text"] for line in read_jsonl(plan.folder / "probe.jsonl")]
    runs = [run_stats(name, seed, plan, start, sources) for name, seed in _runs(plan)]
    return {
        "held_out": HELD_OUT.name,
        "sources": len(start["sources"]),
        "updates": plan.updates,
        "settings": plan.settings,
        "start": compute_stats(start["sources"]),
        "runs": runs,
    }


def run_stats(
    name: str, seed: int, plan: Plan, start: dict[str, Any], sources: Sequence[str]
) -> dict[str, Any]:
    """Return the stats of one run: its curve, and start against end on the same sources.

    sources: of the probe's samples.
    """
    arm, folder = plan.arms[name], plan.folder / f"{name}-{seed}"
    measured = {0: start} | {
        int(path.stem.split("-")[1]): _read(path) for path in _measured(folder)
    }
    curve = [
        {
            "update": update,
            "probe_gap": probe_gap(measured_update["probe"]),
            **compute_stats(measured_update["sources"]),
        }
        for update, measured_update in sorted(measured.items())
    ]
    end = measured[max(measured)]
    compared = compare_policies(start["sources"], end["sources"])["all"]
    log = read_jsonl(folder / "log.jsonl")
    kl = [line["kl_ref_k3"] for line in log[-_LAST:] if line["kl_ref_k3"] is not None]
    return {
        "arm": name,
        "title": arm.title,
        "seed": seed,
        "settings": list(arm.settings),
        "seconds": _read(folder / "trained.json")["seconds"],
        "updates": len(log),
        "kl": mean_of(kl),
        "training_coverage": mean_of([line["reward_coverage"] for line in log]),
        "curve": curve,
        "own_reward": own_change(start["sources"], end["sources"], arm),
        "changes": {
            pair_stats.key: {
                "before": pair_stats.first,
                "after": pair_stats.second,
                "change": pair_stats.difference,
                "interval": [pair_stats.low, pair_stats.high],
            }
            for pair_stats in compared
        },
        "groups": by_fault(start["sources"], end["sources"]),
        "probe": probe_changes(start["probe"], end["probe"], sources),
    }


def own_reward(line: Line, arm: Arm) -> float | None:
    """Return an arm's reward of one translation, or None if a needed score is missing.

    w_metricx (5 - MetricX) + w_span times the mean penalty of a token, plus w_omission times the
    omissions' weights, divided by the number of tokens.
    """
    reward = 0.0
    if arm.w_metricx:
        if line["metricx_score"] is None:
            return None
        reward += arm.w_metricx * (5.0 - line["metricx_score"])
    if arm.w_span:
        if line["penalty"] is None:
            return None
        reward += arm.w_span * line["penalty"]
    if arm.w_omission:
        if line["omission"] is None:
            return None
        reward += arm.w_omission * line["omission"] / line["tokens"]
    return reward


def own_change(first: Sequence[Line], last: Sequence[Line], arm: Arm) -> dict[str, Any]:
    """Return the arm's own reward before and after, over the sources that have both.

    `errors`: the change in paired standard errors.
    """
    rewards = [(own_reward(a, arm), own_reward(b, arm)) for a, b in zip(first, last, strict=True)]
    both = [(a, b) for a, b in rewards if a is not None and b is not None]
    change = paired_standard_error([b - a for a, b in both])
    return {
        "sources": len(both),
        "before": mean_of([a for a, _ in both]),
        "after": mean_of([b for _, b in both]),
        "change": change.mean,
        "standard_error": change.standard_error,
        "errors": change.errors,
    }


def compute_stats(lines: Sequence[Line]) -> dict[str, Any]:
    """Return means over the held-out sources that have the value, and chrF and BLEU of the corpus.

    coverage: share that both services scored. korean: share of letters in the target's script, for
    translations that are not empty.
    """
    texts = [line["mt"] for line in lines]
    quality = reference_stats([line["pair"] for line in lines], texts, [x["ref"] for x in lines])
    spans = [line["error_spans"] for line in lines if line["error_spans"] is not None]
    scored = [line["metricx_score"] is not None and line["penalty"] is not None for line in lines]
    return {
        "chrf": quality["chrf"],
        "bleu": quality["bleu"],
        **{key: _mean(lines, key) for key in ("metricx_score", "xcomet_score", "penalty")},
        "spans": mean_of([len(line_spans) for line_spans in spans]),
        "spans_CRITICAL": mean_of(
            [sum(span["severity"] == "CRITICAL" for span in line_spans) for line_spans in spans]
        ),
        "tokens": _mean(lines, "tokens"),
        "omission": mean_of([x["omission"] for x in lines if x.get("omission") is not None]),
        "cut": mean_of([line["finish_reason"] == "length" for line in lines]),
        "empty": mean_of([not text for text in texts]),
        "korean": mean_of([1.0 - line["guards"]["script"] for line in lines if line["mt"]]),
        "copied": mean_of([line["guards"]["copy"] for line in lines]),
        "coverage": mean_of(scored),
    }


def start_fault(line: Line) -> str:
    """Return the kind of error in a translation of the start policy that simple rules can
    detect.
    """
    if max(line["guards"]["script"], line["guards"]["copy"]) >= _UNTRANSLATED:
        return "untranslated"
    return "short" if len(line["mt"]) <= _SHORT * len(line["ref"]) else "neither"


def by_fault(first: Sequence[Line], last: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Return [before, after] of some stats for the sources of each `start_fault`.

    The stats are corpus chrF, MetricX and the mean length (characters, as a share of the
    reference's).
    """
    stats_by_fault: dict[str, dict[str, Any]] = {}
    for name in ("untranslated", "short", "neither"):
        chosen = [i for i, line in enumerate(first) if start_fault(line) == name]
        if not chosen:
            continue
        both = [[lines[i] for i in chosen] for lines in (first, last)]
        means = [compute_stats(lines) for lines in both]
        stats_by_fault[name] = {
            "sources": len(chosen),
            "chrf": [mean["chrf"] for mean in means],
            "metricx_score": [mean["metricx_score"] for mean in means],
            "length": [
                mean_of([len(line["mt"]) / len(line["ref"]) for line in lines]) for lines in both
            ],
        }
    return stats_by_fault


def probe_gap(probe: Sequence[Mapping[str, float]]) -> float:
    """Return the mean log-probability of the penalized tokens of the start policy's samples,
    minus that of the others.
    """
    total = {key: sum(line[key] for line in probe) for key in probe[0]}
    return total["hit_logp"] / total["hit_n"] - total["free_logp"] / total["free_n"]


def probe_changes(
    before: Sequence[Mapping[str, float]],
    after: Sequence[Mapping[str, float]],
    sources: Sequence[str],
) -> dict[str, Any]:
    """Return how a policy changed the probabilities of penalized (`hit`) and other (`free`)
    tokens.

    Mean log-probability (`logp`) and probability (`p`) under two policies, and the `gap`: how much
    more those of penalized tokens changed. 95 % intervals by bootstrap over sources.
    sources: of each sample.
    """
    index_by_source = {source: index for index, source in enumerate(dict.fromkeys(sources))}
    keys = list(before[0])
    sums_N2S = np.zeros((len(index_by_source), 2, len(keys)))
    for policy, lines in enumerate((before, after)):
        for line, source in zip(lines, sources, strict=True):
            sums_N2S[index_by_source[source], policy] += [line[key] for key in keys]

    def mean(kind: str, value: str, sums: Any) -> float:
        return float(sums[keys.index(f"{kind}_{value}")] / max(1.0, sums[keys.index(f"{kind}_n")]))

    def gap(value: str, sums: Any) -> float:
        return mean("hit", value, sums) - mean("free", value, sums)

    start, end = sums_N2S.sum(axis=0)
    changes: dict[str, Any] = {
        f"{kind}_tokens": int(start[keys.index(f"{kind}_n")]) for kind in ("hit", "free")
    }
    for value in ("logp", "p"):
        parts = {kind: partial(mean, kind, value) for kind in ("hit", "free")}
        for name, score in (parts | {"gap": partial(gap, value)}).items():
            low, high = np.quantile(bootstrap_differences(sums_N2S, score), [0.025, 0.975])
            changes[f"{name}_{value}"] = {
                "before": score(start),
                "after": score(end),
                "interval": [float(low), float(high)],
            }
    return changes


def _runs(plan: Plan) -> list[tuple[str, int]]:
    """Return (arm, seed) of all measured runs, also of another plan, arm by arm."""
    return [
        (name, int(path.name.removeprefix(f"{name}-")))
        for name in plan.arms
        for path in sorted(plan.folder.glob(f"{name}-[0-9]*"))
        if _measured(path)
    ]


def _measured(folder: Path) -> list[Path]:
    return sorted(folder.glob("measured-*.json"))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _mean(lines: Sequence[Line], key: str) -> float | None:
    return mean_of([line[key] for line in lines if line[key] is not None])
