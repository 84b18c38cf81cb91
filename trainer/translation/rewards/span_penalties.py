"""Token penalties of error spans: by each service that marks them, then of all together."""

from __future__ import annotations

from scorekit.credit.spans import combine_sources, covered_tokens, spans_to_token_rewards
from scorekit.errors import ScorekitError
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName
from trainer.translation.rewards.sample_reward import SampleReward, SpanPenalties
from trainer.translation.rollouts import TranslationRollout


def add_span_penalties(
    reward: SampleReward,
    rollout: TranslationRollout,
    cfg: RewardConfig,
    service: ServiceName,
    weight: float,
) -> None:
    """Record the token penalties of one service's spans; `settle_spans` applies them.

    Raises ScorekitError if it gave no spans.
    """
    answer = reward.answers.get(service)
    if answer is None or answer.error_spans is None:
        label = {"xcomet": "xCOMET"}.get(service, service)
        raise ScorekitError(
            f"the {label} scorer gives no error spans. Set reward.w_{service}_span to 0"
        )
    text, offsets = rollout.completion_text, rollout.token_char_offsets
    penalties = spans_to_token_rewards(
        text,
        offsets,
        answer.error_spans,
        cfg.severity_weights.model_dump(),
        cfg.overlap_policy,
        overlap_threshold=cfg.overlap_threshold,
        combine=cfg.span_combine,
        use_confidence=cfg.use_confidence,
    )
    reward.span_penalties[service] = SpanPenalties(
        [weight * penalty for penalty in penalties],
        covered_tokens(text, offsets, answer.mt_covered),
    )


def settle_spans(reward: SampleReward, cfg: RewardConfig) -> None:
    """Add the penalties of all services to the tokens, by `span_sources_combine`.

    Records the tokens that one of the services has not read.
    """
    if not reward.span_penalties:
        return
    penalties, covered = zip(*reward.span_penalties.values(), strict=True)
    for token, penalty in enumerate(combine_sources(penalties, cfg.span_sources_combine)):
        reward.token_rewards[token] += penalty
    read = [all(flags) for flags in zip(*covered, strict=True)]
    reward.uncovered_tokens = read.count(False)
    if cfg.uncovered == "exclude":
        reward.valid = read
