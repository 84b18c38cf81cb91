"""The figures that are logged, and the table that says how each is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.runs.figures import Curve, Figure, Figures, mean_of, mean_std
from trainer.runs.rollout_figures import LEARNING_CURVES, OF_COMPLETIONS, OF_LEARNING
from trainer.runs.runlog import read_jsonl
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.terms import shown_terms
from trainer.translation.rewards.terms.xcomet_spans import SEVERITIES

_FRONT = (
    Figure(key="update", column="update", form="6d", narrow=True),
    Figure(key="r_seq_mean", column="r_seq", narrow=True),
    Figure(key="reward_mean", title="reward (sequence and tokens)", better="higher"),
    Figure(
        key="reward_coverage",
        title="reward coverage",
        better="higher",
        column="cover",
        form="6.2f",
        narrow=True,
    ),
)
#: Behind the titles of figures that no reward is made of, and of one that may be.
NO_REWARD, A_REWARD = " (never a reward)", " (a reward)"
_CHRF = Figure(key="chrf", title="chrF", digits=2, better="higher", said=True, by_group=True)
_BACK = (
    Figure(
        key="bleu",
        title=f"BLEU{NO_REWARD}",
        digits=2,
        better="higher",
        said=True,
        by_group=True,
    ),
    *OF_COMPLETIONS,
    *OF_LEARNING,
)
_LAST_CURVES = (
    Curve(title="held-out chrF", held_out="chrf"),
    Curve(title="sequence reward", keys=("r_seq_mean",)),
    Curve(
        title="completion length (tokens)",
        keys=("completion_length_mean",),
        held_out="completion_length_mean",
    ),
    Curve(
        title="completions cut by max_new_tokens",
        keys=("truncated_frac",),
        held_out="truncated_frac",
    ),
    *LEARNING_CURVES,
)


def table(*known: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Every figure that is shown anywhere, in the order in which it is: console, tables, pages and
    comparisons read this one. known: figures of evaluations, or lines of their dumps, whose
    held-out metrics (`eval.metrics`) it is to have, and which say whether chrF was a reward."""
    of_terms = (figure for term in shown_terms() for figure in term.table)
    is_paid = any(figures.get("chrf_reward_mean") is not None for figures in known)
    chrf = replace(_CHRF, title=f"{_CHRF.title}{A_REWARD if is_paid else NO_REWARD}")
    return (*_FRONT, *of_terms, *held_out_table(*known), chrf, *_BACK)


def held_out_table(*known: Mapping[str, Any]) -> list[Figure]:
    """The figures of `eval.metrics` that stand in these, by name."""
    better: dict[str, Any] = {}
    for figures in known:
        for name in _metric_names(figures):
            better[name] = figures.get(f"metric_{name}_better") or better.get(name)
    return [
        Figure(
            key=f"metric_{name}_mean",
            title=f"{name}{NO_REWARD}",
            better=direction,
            said=True,
            by_group=True,
            coverage=f"metric_{name}_coverage",
            of_line=partial(_of_line, name),
            ranks=name,
        )
        for name, direction in better.items()
    ]


def metrics_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `table` needs to know of the metrics that stand in the lines of a dump."""
    known: dict[str, Any] = {}
    for line in lines[:1]:
        for name, told in line.get("metrics", {}).items():
            known |= {f"metric_{name}_coverage": None, f"metric_{name}_better": told["better"]}
    return known


def _of_line(name: str, line: Mapping[str, Any]) -> float | None:
    score: float | None = line.get("metrics", {}).get(name, {}).get("score")
    return score


def _metric_names(figures: Mapping[str, Any]) -> list[str]:
    ending = "_coverage"
    return [
        key.removeprefix("metric_").removesuffix(ending)
        for key in figures
        if key.startswith("metric_") and key.endswith(ending)
    ]


class Judge(NamedTuple):
    """Who ranks examples: `of` gives the value of a line of a dump of completions, or None; sign: 1
    where higher is better, else -1."""

    who: str
    sign: int
    of: Callable[[Mapping[str, Any]], float | None]


#: Ranks those that no model has scored.
CHRF = Judge("chrF", 1, lambda line: line.get("chrf"))


def ranking() -> list[Judge]:
    """The models that rank examples, the one that decides first."""
    return [
        Judge(figure.ranks, 1 if figure.better == "higher" else -1, figure.of_line)
        for figure in table()
        if figure.ranks and figure.of_line
    ]


def curves(*evaluations: Mapping[str, Any]) -> tuple[Curve, ...]:
    """The pictures of a run's page. evaluations: lines of eval.jsonl."""
    of_metrics = [
        Curve(title=f"held-out {figure.title}", held_out=figure.key)
        for figure in held_out_table(*evaluations)
    ]
    of_terms = (curve for term in shown_terms() for curve in term.curves)
    coverage = tuple(figure.key for figure in table() if figure.key.endswith("_coverage"))
    return (
        *of_terms,
        *of_metrics,
        *_LAST_CURVES,
        Curve(title="coverage (scored / asked)", keys=(*coverage[1:], coverage[0])),
        Curve(
            title="seconds of an update", keys=("rollout_s", "logprob_s", "reward_s", "update_s")
        ),
    )


class SeverityCount(NamedTuple):
    """Error spans of one severity. share: of all spans, None without any. segments: those with
    such a span, of the `scored` ones."""

    severity: str
    spans: int
    share: float | None
    segments: int
    scored: int


def severity_counts(lines: Sequence[Mapping[str, Any]]) -> list[SeverityCount]:
    """Of the segments of a completions dump whose spans are known; [] where none are."""
    found = [
        [span["severity"].upper() for span in line["error_spans"]]
        for line in lines
        if line["error_spans"] is not None
    ]
    if not found:
        return []
    every = sum(map(len, found))
    counts = []
    others = {severity for of_segment in found for severity in of_segment}.difference(SEVERITIES)
    for severity in (*SEVERITIES, *sorted(others)):
        spans = sum(of_segment.count(severity) for of_segment in found)
        segments = sum(severity in of_segment for of_segment in found)
        share = spans / every if every else None
        counts.append(SeverityCount(severity, spans, share, segments, len(found)))
    return counts


def term_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """Those of every term, and what became of the samples.

    `text_errors`: samples that cannot be scored by their own fault; `source_errors`: by their
    source's, which costs nothing; `overlong_*`: samples over a model's limit, by what became of
    them (skipped and penalised ones are text errors, too).
    """
    figures: Figures = {}
    for term in shown_terms():
        figures |= term.figures(rewards, cfg)
    figures["text_errors"] = sum(r.text_error is not None for r in rewards)
    figures["source_errors"] = sum(r.source_error is not None for r in rewards)
    for fate in ("truncated", "windowed", "skipped", "penalised"):
        figures[f"overlong_{fate}"] = sum(r.overlong == fate for r in rewards)
    return figures


def reward_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """`term_figures`, and what came of them: sequence and token rewards of kept samples."""
    kept = [reward for reward in rewards if reward.r_seq is not None]
    tokens = [
        value
        for reward in kept
        for value, valid in zip(reward.token_rewards, reward.valid, strict=True)
        if valid
    ]
    return {
        **term_figures(rewards, cfg),
        **mean_std("r_seq", [reward.r_seq for reward in kept if reward.r_seq is not None]),
        "reward_mean": mean_of(earned(rewards)),
        "reward_coverage": len(kept) / max(1, len(rewards)),
        **mean_std("token_rewards", tokens),
        "token_rewards_nonzero_frac": mean_of([value != 0 for value in tokens]),
        "uncovered_tokens": sum(reward.uncovered_tokens for reward in kept),
    }


def earned(rewards: Sequence[SampleReward]) -> list[float]:
    """Sequence reward and mean token reward together, of each sample that has them."""
    return [
        reward.r_seq + (mean_of(reward.token_rewards) or 0.0)
        for reward in rewards
        if reward.r_seq is not None
    ]


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's eval.jsonl; those of 0.1, which had the guards' faults in a mapping, as
    they are written now."""
    lines = read_jsonl(folder / "eval.jsonl")
    for line in lines:
        for of in (line, *line.get("pairs", {}).values()):
            faults = of.pop("guards", None) or {}
            of |= {f"guard_{name}_mean": fault for name, fault in faults.items()}
    return lines
