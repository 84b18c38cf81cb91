"""What a completion earns: the services' answers -> sequence reward and token rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from scorekit.errors import TEXT_ERROR_TYPES, ScorekitError
from scorekit.schemas import ErrorSpan, Failed, Scored
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.credit import covered_tokens, spans_to_token_rewards
from trainer.translation.rewards.guards import guard_faults, guard_penalty
from trainer.translation.rewards.score_batch import BAD_SOURCE, Scores, ServiceName, is_truncated
from trainer.translation.rollouts import TranslationRollout


@dataclass(slots=True)
class SampleReward:
    """What one completion earned.

    r_seq: sequence reward; None: a service failed, the source is at fault, or the text is overlong
    and skipped: the sample takes no part in the update, nor in its mean and deviation.
    token_rewards: span term of each token, already weighted.
    valid: tokens to learn from; False behind what the span model could read, where
    `reward.uncovered` excludes them.
    uncovered_tokens: tokens behind what the span model could read, excluded or not.
    metricx_score, xcomet_score: the models' own scores; None where not asked or failed.
    error_spans: None where not asked or failed.
    metricx_truncated, xcomet_truncated: whether the model read less than the whole source and
    translation; None where not asked or failed.
    asked: services that were asked for this sample.
    text_error: why the text could not be scored by its own fault; source_error: why no translation
    of its source can be; service_error: why a service gave no score; shown_error: why one that has
    no weight in the reward gave none, which costs nothing. may_pass: whether the service may score
    the same sample later.
    overlong: what became of a text over a model's limit (`reward.overlong`).
    guards: fault of each guard that was asked for (trainer/translation/rewards/guards.py), 0 to 1.
    """

    r_seq: float | None
    token_rewards: list[float]
    valid: list[bool]
    uncovered_tokens: int = 0
    metricx_score: float | None = None
    xcomet_score: float | None = None
    error_spans: list[ErrorSpan] | None = None
    metricx_truncated: bool | None = None
    xcomet_truncated: bool | None = None
    asked: tuple[ServiceName, ...] = ()
    text_error: str | None = None
    source_error: str | None = None
    service_error: str | None = None
    shown_error: str | None = None
    may_pass: bool = False
    overlong: Literal["truncated", "skipped", "penalised"] | None = None
    guards: dict[str, float] = field(default_factory=dict)


def sample_rewards(
    rollouts: Sequence[TranslationRollout], scores: Scores, cfg: RewardConfig
) -> list[SampleReward]:
    """Raw answers -> rewards.

    r_seq = w_metricx (metricx_offset - metricx_score) + w_xcomet_seq xcomet_seq_scale xcomet_score
            - sum over guards w_guard fault - no_eos_penalty if cut by max_new_tokens,
    or `text_error_reward` where the text is at fault, or None where a service failed, the source is
    at fault, or an overlong text is skipped.
    """
    return [
        _sample_reward(rollout, {name: scores.results[name][i] for name in scores.results}, cfg)
        for i, rollout in enumerate(rollouts)
    ]


def _sample_reward(
    rollout: TranslationRollout, results: dict[ServiceName, Scored | Failed], cfg: RewardConfig
) -> SampleReward:
    tokens = len(rollout.completion_token_ids)
    reward = SampleReward(0.0, [0.0] * tokens, [True] * tokens, asked=tuple(results))
    src_lang, _, tgt_lang = rollout.pair.partition(">")
    reward.guards = guard_faults(
        rollout.src_text, rollout.completion_text, src_lang, tgt_lang, cfg.guards
    )
    _note_results(reward, results, cfg)
    no_eos = cfg.no_eos_penalty if rollout.finish_reason == "length" else 0.0
    if reward.source_error is not None or reward.overlong == "skipped":
        reward.r_seq = None
        return reward
    if reward.text_error is not None:
        reward.r_seq = cfg.text_error_reward - no_eos
        return reward
    if reward.service_error is not None:
        reward.r_seq = None
        return reward
    reward.r_seq = -no_eos - guard_penalty(reward.guards, cfg.guards)
    if reward.metricx_score is not None:
        reward.r_seq += cfg.w_metricx * metricx_reward(reward.metricx_score, cfg.metricx_offset)
    if reward.xcomet_score is not None:
        reward.r_seq += cfg.w_xcomet_seq * cfg.xcomet_seq_scale * reward.xcomet_score
    if cfg.needs_spans:
        _add_span_term(reward, rollout, results["xcomet"], cfg)
    return reward


def _note_results(
    reward: SampleReward, results: dict[ServiceName, Scored | Failed], cfg: RewardConfig
) -> None:
    """Scores and faults as the services gave them."""
    counts = {"metricx": cfg.needs_metricx, "xcomet": cfg.needs_xcomet}
    faults: dict[str, str] = {}  # type -> what is said of it
    for name, result in results.items():
        if isinstance(result, Scored):
            setattr(reward, f"{name}_score", result.score)
            setattr(reward, f"{name}_truncated", is_truncated(result))
            if is_truncated(result):
                reward.overlong = "truncated"
            if name == "xcomet":
                reward.error_spans = result.error_spans
        elif not counts[name]:
            reward.shown_error = f"{name}: {result.error.type}: {result.error.message}"
        elif result.error.type == BAD_SOURCE:
            reward.source_error = f"{name}: {result.error.type}: {result.error.message}"
        elif result.error.type in TEXT_ERROR_TYPES:
            faults[result.error.type] = f"{name}: {result.error.type}"
        else:
            reward.service_error = f"{name}: {result.error.type}: {result.error.message}"
            reward.may_pass |= result.error.retryable
    reward.text_error = faults.get("invalid_input") or faults.get("overlong")
    if "overlong" in faults:
        skipped = cfg.overlong == "skip" and "invalid_input" not in faults
        reward.overlong = "skipped" if skipped else "penalised"


def _add_span_term(
    reward: SampleReward, rollout: TranslationRollout, result: Scored | Failed, cfg: RewardConfig
) -> None:
    if not isinstance(result, Scored) or result.error_spans is None:
        raise ScorekitError("the xCOMET scorer gives no error spans; set reward.w_xcomet_span to 0")
    penalties = spans_to_token_rewards(
        rollout.completion_text,
        rollout.token_char_offsets,
        result.error_spans,
        cfg.severity_weights.model_dump(),
        cfg.overlap_policy,
        overlap_threshold=cfg.overlap_threshold,
        combine=cfg.span_combine,
        use_confidence=cfg.use_confidence,
    )
    reward.token_rewards = [cfg.w_xcomet_span * penalty for penalty in penalties]
    covered = covered_tokens(rollout.completion_text, rollout.token_char_offsets, result.mt_covered)
    reward.uncovered_tokens = covered.count(False)
    if cfg.uncovered == "exclude":
        reward.valid = covered


def metricx_reward(score: float, offset: float = 5.0) -> float:
    """offset - score: the reward of TranslateGemma (arXiv 2601.09012, section 4)."""
    return offset - score
