"""The stats of a translation run, and the table that describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.runs.rollout_stats import LEARNING_CURVES, OF_COMPLETIONS, OF_LEARNING
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of, mean_std
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.stats import PARTS, SEVERITIES

_FRONT = (
    StatSpec(key="update", column="update", form="6d", narrow=True),
    StatSpec(key="r_seq_mean", column="r_seq", narrow=True),
    StatSpec(key="reward_mean", title="reward (sequence and tokens)", better="higher"),
    StatSpec(
        key="reward_coverage",
        title="reward coverage",
        better="higher",
        column="cover",
        form="6.2f",
        narrow=True,
    ),
)
#: Suffixes of titles, for stats that no reward is made of, and for one that may be.
NO_REWARD, A_REWARD = " (never a reward)", " (a reward)"
_CHRF = StatSpec(
    key="chrf", title="chrF", digits=2, better="higher", in_console=True, by_group=True
)
_BACK = (
    StatSpec(
        key="bleu",
        title=f"BLEU{NO_REWARD}",
        digits=2,
        better="higher",
        in_console=True,
        by_group=True,
    ),
    *OF_COMPLETIONS,
    *OF_LEARNING,
)
_LAST_CURVES = (
    Curve(title="held-out chrF", held_out="chrf"),
    Curve(title="sequence reward", keys=("r_seq_mean",)),
    Curve.with_held_out("completion length (tokens)", "completion_length_mean"),
    Curve.with_held_out("completions cut by max_new_tokens", "truncated_frac"),
    *LEARNING_CURVES,
)


def table(*evaluations: Mapping[str, Any]) -> tuple[StatSpec, ...]:
    """Return every stat in the order of display, for console, tables, pages and comparisons.

    evaluations: stats of evaluations, or lines of their dumps. They define the held-out metrics
    (`eval.metrics`), and whether chrF was a reward.
    """
    component_stats = (stat for part in PARTS for stat in part.table)
    is_paid = any(values.get("chrf_reward_mean") is not None for values in evaluations)
    chrf = replace(_CHRF, title=f"{_CHRF.title}{A_REWARD if is_paid else NO_REWARD}")
    return (*_FRONT, *component_stats, *held_out_table(*evaluations), chrf, *_BACK)


def held_out_table(*evaluations: Mapping[str, Any]) -> list[StatSpec]:
    """Return the stats of `eval.metrics` that these have, by name."""
    better: dict[str, Any] = {}
    for values in evaluations:
        for key in values:
            if key.startswith("metric_") and key.endswith("_coverage"):
                name = key.removeprefix("metric_").removesuffix("_coverage")
                better[name] = values.get(f"metric_{name}_better") or better.get(name)
    return [
        StatSpec(
            key=f"metric_{name}_mean",
            title=f"{name}{NO_REWARD}",
            better=direction,
            in_console=True,
            by_group=True,
            coverage=f"metric_{name}_coverage",
            value_of_row=partial(_metric_score, name),
            ranks=name,
        )
        for name, direction in better.items()
    ]


def metrics_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that `table` needs to describe the metrics of a dump."""
    values: dict[str, Any] = {}
    for line in lines[:1]:
        for name, metric in line.get("metrics", {}).items():
            values |= {f"metric_{name}_coverage": None, f"metric_{name}_better": metric["better"]}
    return values


def _metric_score(name: str, line: Mapping[str, Any]) -> float | None:
    score: float | None = line.get("metrics", {}).get(name, {}).get("score")
    return score


class ExampleRanker(NamedTuple):
    """A score that ranks examples.

    label: its name.
    sign: 1 if higher is better, else -1.
    value_of: returns the value of a line of a dump of completions, or None.
    """

    label: str
    sign: int
    value_of: Callable[[Mapping[str, Any]], float | None]


#: Ranks examples that no model has scored.
CHRF = ExampleRanker("chrF", 1, lambda line: line.get("chrf"))


def ranking() -> list[ExampleRanker]:
    """Return the scores that rank examples, the preferred one first."""
    return [
        ExampleRanker(stat.ranks, 1 if stat.better == "higher" else -1, stat.value_of_row)
        for stat in table()
        if stat.ranks and stat.value_of_row
    ]


def curves(*evaluations: Mapping[str, Any]) -> tuple[Curve, ...]:
    """Return the charts of a run's page.

    evaluations: lines of eval.jsonl.
    """
    metric_curves = [
        Curve(title=f"held-out {stat.title}", held_out=stat.key)
        for stat in held_out_table(*evaluations)
    ]
    component_curves = (curve for part in PARTS for curve in part.curves)
    coverage = tuple(stat.key for stat in table() if stat.key.endswith("_coverage"))
    return (
        *component_curves,
        *metric_curves,
        *_LAST_CURVES,
        Curve(title="coverage (scored / requested)", keys=(*coverage[1:], coverage[0])),
        Curve(
            title="seconds of an update", keys=("rollout_s", "logprob_s", "reward_s", "update_s")
        ),
    )


class SeverityCount(NamedTuple):
    """Error spans of one severity.

    share: of all spans; None without any.
    segments: number of segments with such a span, of the `scored` ones.
    """

    severity: str
    spans: int
    share: float | None
    segments: int
    scored: int


def severity_counts(lines: Sequence[Mapping[str, Any]]) -> list[SeverityCount]:
    """Return the counts for the segments of a completions dump with known spans; [] without any."""
    severities_by_segment = [
        [span["severity"].upper() for span in line["error_spans"]]
        for line in lines
        if line["error_spans"] is not None
    ]
    if not severities_by_segment:
        return []
    severities_of_all = [
        severity for severities in severities_by_segment for severity in severities
    ]
    counts = []
    for severity in (*SEVERITIES, *sorted(set(severities_of_all).difference(SEVERITIES))):
        spans = severities_of_all.count(severity)
        segments = sum(severity in severities for severities in severities_by_segment)
        share = spans / len(severities_of_all) if severities_of_all else None
        counts.append(SeverityCount(severity, spans, share, segments, len(severities_by_segment)))
    return counts


def component_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    """Return the stats of every component, and how samples were handled.

    `text_errors`: samples that cannot be scored because of their text; `source_errors`: because of
    their source, without a penalty; `overlong_*`: samples over a model's limit, by how they were
    handled (skipped and penalized ones are text errors, too).
    """
    stats: Stats = {}
    for part in PARTS:
        if part.is_shown(rewards):
            stats |= part.stats(rewards, cfg)
    stats["text_errors"] = sum(r.text_error is not None for r in rewards)
    stats["source_errors"] = sum(r.source_error is not None for r in rewards)
    for handling in ("truncated", "windowed", "skipped", "penalised"):
        stats[f"overlong_{handling}"] = sum(r.overlong == handling for r in rewards)
    return stats


def reward_stats(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
    """Return `component_stats`, and the sequence and token rewards of scored samples."""
    scored = [reward for reward in rewards if reward.r_seq is not None]
    tokens = [
        value
        for reward in scored
        for value, valid in zip(reward.token_rewards, reward.valid, strict=True)
        if valid
    ]
    return {
        **component_stats(rewards, cfg),
        **mean_std("r_seq", [reward.r_seq for reward in scored if reward.r_seq is not None]),
        "reward_mean": mean_of(total_rewards(rewards)),
        "reward_coverage": len(scored) / max(1, len(rewards)),
        **mean_std("token_rewards", tokens),
        "token_rewards_nonzero_frac": mean_of([value != 0 for value in tokens]),
        "uncovered_tokens": sum(reward.uncovered_tokens for reward in scored),
    }


def total_rewards(rewards: Sequence[SampleReward]) -> list[float]:
    """Return sequence reward plus mean token reward of each sample that has them."""
    return [
        reward.r_seq + (mean_of(reward.token_rewards) or 0.0)
        for reward in rewards
        if reward.r_seq is not None
    ]


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's eval.jsonl.

    Lines of version 0.1, which had the guards' values in a mapping, are converted.
    """
    lines = read_jsonl(folder / "eval.jsonl")
    for line in lines:
        for stats in (line, *line.get("pairs", {}).values()):
            guard_values = stats.pop("guards", None) or {}
            stats |= {f"guard_{name}_mean": value for name, value in guard_values.items()}
    return lines
