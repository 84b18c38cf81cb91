"""Token penalties of error spans: by each service that marks them, then of all together."""

from __future__ import annotations

from scorekit.credit.spans import combine_sources, covered_tokens, spans_to_token_rewards
from scorekit.errors import ScorekitError
from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName
from trainer.translation.rewards.sample_reward import SampleReward, SpanPenalties
from trainer.translation.rollouts import TranslationRollout


class SpanComponent(RewardComponent):
    """The penalty of each token inside an error span that the service marks, times its weight."""

    service: ServiceName

    def weight(self, cfg: RewardConfig) -> float:
        """Return the weight, if any severity has one."""
        return cfg.weight_of_spans(super().weight(cfg))

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Record the token penalties, and which tokens the model has read, for `settle_spans`.

        Raises ScorekitError if the service gave no spans.
        """
        answer = reward.answers.get(self.service)
        if answer is None or answer.error_spans is None:
            label = {"xcomet": "xCOMET"}.get(self.service, self.service)
            raise ScorekitError(
                f"the {label} scorer gives no error spans. Set reward.{self.weight_key} to 0"
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
        weight = super().weight(cfg)
        reward.span_penalties[self.service] = SpanPenalties(
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
