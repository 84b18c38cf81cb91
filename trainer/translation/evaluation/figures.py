"""The figures that are logged. A mean without values is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from scorekit.schemas import ErrorSpan, Severity
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.config import RLConfig
from trainer.rl.loss import importance_weights
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.formula import SampleReward, metricx_reward
from trainer.translation.rewards.guards import GUARDS
from trainer.translation.rewards.score_batch import ServiceName
from trainer.translation.rollouts import TranslationRollout

Figures = dict[str, float | int | None]
#: Severities that have a figure each; all other words are counted together, as UNKNOWN.
SEVERITIES = get_args(Severity)


#: Rows of a comparison: title, field of `Report`, digits, whether higher is better (None: neither).
REPORT_ROWS: tuple[tuple[str, str, int, bool | None], ...] = (
    ("reward (sequence and tokens)", "reward_mean", 3, True),
    ("reward coverage", "reward_coverage", 3, True),
    ("MetricX score", "metricx_score_mean", 3, False),
    ("MetricX reward", "metricx_reward_mean", 3, True),
    ("MetricX coverage", "metricx_coverage", 3, True),
    ("xCOMET score", "xcomet_score_mean", 3, True),
    ("xCOMET coverage", "xcomet_coverage", 3, True),
    ("error spans a segment", "spans_mean", 2, False),
    ("· minor", "spans_MINOR_mean", 2, False),
    ("· major", "spans_MAJOR_mean", 2, False),
    ("· critical", "spans_CRITICAL_mean", 2, False),
    ("· other", "spans_UNKNOWN_mean", 2, False),
    ("chrF (never a reward)", "chrf", 2, True),
    ("BLEU (never a reward)", "bleu", 2, True),
    ("completion length (tokens)", "completion_length_mean", 1, None),
    ("cut by max_new_tokens", "truncated_frac", 3, False),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row, ready to be shown; `verdict` is "better", "worse" or ""."""

    title: str
    before: str
    after: str
    change: str
    verdict: str


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], only: str | None = None
) -> list[Comparison]:
    """The figures of two reports side by side. only: this field alone."""
    before, after = ({**of, **_guard_rows(of)} for of in (before, after))
    guards = tuple((key, key, 3, False) for key in _guard_rows(before))
    rows = []
    for title, key, digits, higher in REPORT_ROWS + guards:
        if only not in (None, key):
            continue
        old, new = before.get(key), after.get(key)
        if key == "spans_UNKNOWN_mean" and not (old or new):  # our services know no others
            continue
        if old is None or new is None:
            change, verdict = "–", ""
        else:
            change = f"{new - old:+.{digits}f}"
            judged = higher is not None and round(new - old, digits) != 0
            verdict = ("better" if (new > old) == higher else "worse") if judged else ""
        rows.append(Comparison(title, _show(old, digits), _show(new, digits), change, verdict))
    return rows


def _guard_rows(figures: Mapping[str, Any]) -> dict[str, float]:
    return {f"guard: {name}": fault for name, fault in (figures.get("guards") or {}).items()}


def _show(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


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


def mean_std(name: str, values: Sequence[float]) -> Figures:
    """`{name}_mean` and `{name}_std` (of the population)."""
    mean = mean_of(values)
    if mean is None:
        return {f"{name}_mean": None, f"{name}_std": None}
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(variance)}


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def rollout_figures(rollouts: Sequence[TranslationRollout]) -> Figures:
    """Lengths in tokens, EOS included; `entropy_est` is the mean of -log pi of sampled tokens."""
    logprobs = [value for rollout in rollouts for value in rollout.old_logprobs or ()]
    entropy = mean_of(logprobs)
    return {
        "samples": len(rollouts),
        "tokens": sum(len(rollout.completion_token_ids) for rollout in rollouts),
        "completion_length_mean": mean_of([len(r.completion_token_ids) for r in rollouts]),
        "truncated_frac": mean_of([r.finish_reason == "length" for r in rollouts]),
        "unaligned_tokens": sum(rollout.unaligned_tokens for rollout in rollouts),
        "entropy_est": None if entropy is None else -entropy,
    }


def importance_figures(rollouts: Sequence[TranslationRollout], cfg: RLConfig) -> Figures:
    """How far the sampler's log-probabilities are from the trainer's, |log pi - log pi_sampler| of
    sampled tokens, and the weights that correct for it; None where both are one."""
    ours = [value for r in rollouts if r.sampler_logprobs for value in r.old_logprobs or ()]
    theirs = [value for r in rollouts for value in r.sampler_logprobs or ()]
    if not theirs:
        names = ("sampler_gap_mean", "sampler_gap_max")
        return dict.fromkeys((*names, "importance_weight_mean", "importance_capped_frac"))
    old, sampler = torch.tensor(ours), torch.tensor(theirs)
    gap = (old - sampler).abs()
    weights = importance_weights(old, sampler, cfg.importance_cap, cfg.max_log_ratio)
    return {
        "sampler_gap_mean": gap.mean().item(),
        "sampler_gap_max": gap.max().item(),
        "importance_weight_mean": weights.mean().item(),
        "importance_capped_frac": (weights >= cfg.importance_cap).float().mean().item(),
    }


def service_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """Means over the samples that were scored, beside the share of samples that were
    (`*_coverage`), for each service; all None of a service that was never asked.

    `*_truncated_frac`: share of the scored samples that the model could not read whole.
    `text_errors`: samples that cannot be scored by their own fault; `source_errors`: by their
    source's, which costs nothing; `overlong_*`: samples over a
    model's limit, by what became of them (skipped and penalised ones are text errors, too).
    """
    figures: Figures = {}
    metricx = [r.metricx_score for r in rewards if r.metricx_score is not None]
    figures |= mean_std("metricx_score", metricx)
    figures |= mean_std(
        "metricx_reward", [metricx_reward(score, cfg.metricx_offset) for score in metricx]
    )
    figures |= _reading_figures("metricx", rewards)
    xcomet = [r.xcomet_score for r in rewards if r.xcomet_score is not None]
    figures |= mean_std("xcomet_score", xcomet)
    figures |= _reading_figures("xcomet", rewards)
    spans = [r.error_spans for r in rewards if r.error_spans is not None]
    figures["spans_mean"] = mean_of([len(of_sample) for of_sample in spans])
    named = [[_severity(span) for span in of_sample] for of_sample in spans]
    for severity in (*SEVERITIES, "UNKNOWN"):
        figures[f"spans_{severity}_mean"] = mean_of([row.count(severity) for row in named])
    figures["text_errors"] = sum(r.text_error is not None for r in rewards)
    figures["source_errors"] = sum(r.source_error is not None for r in rewards)
    for fate in ("truncated", "skipped", "penalised"):
        figures[f"overlong_{fate}"] = sum(r.overlong == fate for r in rewards)
    return figures


def _severity(span: ErrorSpan) -> str:
    """As the weights of `severity_weights` are named."""
    severity = span.severity.upper()
    return severity if severity in SEVERITIES else "UNKNOWN"


def _reading_figures(service: ServiceName, rewards: Sequence[SampleReward]) -> Figures:
    asked = [r for r in rewards if service in r.asked]
    flags = [getattr(r, f"{service}_truncated") for r in asked]
    return {
        f"{service}_coverage": mean_of([flag is not None for flag in flags]),
        f"{service}_truncated_frac": mean_of([flag for flag in flags if flag is not None]),
    }


def reward_figures(rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
    """`service_figures`, and what became of them: sequence and token rewards of kept samples."""
    kept = [reward for reward in rewards if reward.r_seq is not None]
    tokens = [
        value
        for reward in kept
        for value, valid in zip(reward.token_rewards, reward.valid, strict=True)
        if valid
    ]
    return {
        **service_figures(rewards, cfg),
        **mean_std("r_seq", [reward.r_seq for reward in kept if reward.r_seq is not None]),
        "reward_mean": mean_of(earned(rewards)),
        "reward_coverage": len(kept) / max(1, len(rewards)),
        **mean_std("token_rewards", tokens),
        "token_rewards_nonzero_frac": mean_of([value != 0 for value in tokens]),
        "uncovered_tokens": sum(reward.uncovered_tokens for reward in kept),
        **guard_figures(rewards),
    }


def earned(rewards: Sequence[SampleReward]) -> list[float]:
    """Sequence reward and mean token reward together, of each sample that has them."""
    return [
        reward.r_seq + (mean_of(reward.token_rewards) or 0.0)
        for reward in rewards
        if reward.r_seq is not None
    ]


def guard_figures(rewards: Sequence[SampleReward]) -> Figures:
    """Mean fault of each guard over all samples, also those without a score; None of a guard that
    was not asked for."""
    return {
        f"guard_{name}_mean": mean_of([r.guards[name] for r in rewards if name in r.guards])
        for name in GUARDS
    }


def advantage_figures(advantages: TokenAdvantages | None) -> Figures:
    """A_raw and A_norm over the tokens that are learned from; None without any."""
    if advantages is None:
        return mean_std("A_raw", []) | mean_std("A_norm", [])
    raw = advantages.raw[advantages.mask].tolist()
    norm = advantages.values[advantages.mask].tolist()
    return mean_std("A_raw", raw) | mean_std("A_norm", norm)
