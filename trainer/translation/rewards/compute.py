"""The reward formula: from the services' answers to sequence reward and token rewards."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scorekit.errors import TEXT_ERROR_TYPES
from scorekit.schemas import Failed, Scored
from trainer.translation.rewards.components import COMPONENTS, needed
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import BAD_SOURCE, Scores, ServiceName, is_truncated
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.span_penalties import settle_spans
from trainer.translation.rollouts import TranslationRollout


def compute_rewards(
    rollouts: Sequence[TranslationRollout], scores: Scores, cfg: RewardConfig
) -> list[SampleReward]:
    """Return the rewards of raw answers.

    r_seq = w_metricx (metricx_offset - metricx_score) + w_xcomet_seq xcomet_seq_scale xcomet_score
            - sum over guards w_guard value - no_eos_penalty if truncated by max_new_tokens
            + w_judge verdict + w_definition composite + w_chrf chrF + further components,
    or `text_error_reward` if the text cannot be scored, or None if a service failed, the source
    cannot be scored, or an overlong text is skipped.
    """
    weighted_services = needed(cfg)
    return [
        _sample_reward(
            rollout,
            {name: scores.results[name][i] for name in scores.results},
            cfg,
            weighted_services,
        )
        for i, rollout in enumerate(rollouts)
    ]


def _sample_reward(
    rollout: TranslationRollout,
    results: dict[ServiceName, Scored | Failed],
    cfg: RewardConfig,
    weighted_services: Collection[ServiceName],
) -> SampleReward:
    tokens = len(rollout.completion_token_ids)
    reward = SampleReward(None, [0.0] * tokens, [True] * tokens, services=tuple(results))
    for component in COMPONENTS:
        component.inspect_text(reward, rollout, cfg)
    _note_results(reward, results, cfg, weighted_services)
    if reward.source_error is not None or reward.overlong == "skipped":
        return reward
    if reward.text_error is not None:
        no_eos = cfg.no_eos_penalty if rollout.finish_reason == "length" else 0.0
        reward.r_seq = cfg.text_error_reward - no_eos
        return reward
    if reward.service_error is not None:
        return reward
    reward.r_seq = 0.0
    for component in COMPONENTS:
        if component.weight(cfg):
            component.add_reward(reward, rollout, cfg)
    settle_spans(reward, cfg)
    return reward


def _note_results(
    reward: SampleReward,
    results: dict[ServiceName, Scored | Failed],
    cfg: RewardConfig,
    weighted_services: Collection[ServiceName],
) -> None:
    """Record the services' scores and errors.

    weighted_services: services with a weight.
    """
    text_errors: dict[str, str] = {}  # type -> message
    for name, result in results.items():
        if isinstance(result, Scored):
            reward.answers[name] = result
            if is_truncated(result):
                reward.overlong = "truncated"
            elif result.windows and reward.overlong is None:
                reward.overlong = "windowed"
        elif name not in weighted_services:
            reward.unweighted_error = f"{name}: {result.error.type}: {result.error.message}"
        elif result.error.type == BAD_SOURCE:
            reward.source_error = f"{name}: {result.error.type}: {result.error.message}"
        elif result.error.type in TEXT_ERROR_TYPES:
            text_errors[result.error.type] = f"{name}: {result.error.type}"
        else:
            reward.service_error = f"{name}: {result.error.type}: {result.error.message}"
            reward.is_transient |= result.error.retryable
    reward.text_error = text_errors.get("invalid_input") or text_errors.get("overlong")
    if "overlong" in text_errors:
        skipped = cfg.overlong == "skip" and "invalid_input" not in text_errors
        reward.overlong = "skipped" if skipped else "penalised"
