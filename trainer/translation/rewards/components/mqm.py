"""Reward components of the judge's `mqm` task: errors in the translation, and omissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from scorekit.schemas import Scored
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of, mean_std
from trainer.translation.rewards.component import RewardComponent, coverage_stats
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.credit import severity_weight
from trainer.translation.rewards.reward_batch import MQM
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.span_penalties import add_span_penalties
from trainer.translation.rollouts import TranslationRollout


def _count(line: Mapping[str, Any], key: str) -> float | None:
    entries = line.get(key)
    return None if entries is None else len(entries)


class MQMSpans(RewardComponent):
    """Component: w_mqm_span times the penalty of each token inside a span of `mqm`."""

    name = "mqm_spans"
    service = MQM
    higher_is_better = False
    optional = True
    table = (
        StatSpec(
            key="mqm_score_mean",
            title="MQM score",
            better="lower",
            hidden_at=(None,),
            column="mqm",
            in_console=True,
            by_group=True,
            coverage="mqm_coverage",
            value_of_row=lambda line: line.get("mqm_score"),
        ),
        StatSpec(
            key="mqm_spans_mean",
            title="MQM errors a segment",
            digits=2,
            better="lower",
            hidden_at=(None,),
            column="mqm_sp",
            form="6.2f",
            narrow=True,
            value_of_row=partial(_count, key="mqm_spans"),
        ),
        StatSpec(
            key="mqm_unplaced_mean",
            title="MQM errors without a position",
            digits=2,
            better="lower",
            hidden_at=(None,),
            value_of_row=partial(_count, key="mqm_unplaced"),
        ),
        StatSpec(key="mqm_coverage", title="MQM coverage", better="higher", hidden_at=(None,)),
    )
    curves = (Curve.with_held_out("MQM errors a segment", "mqm_spans_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_mqm_span, if any severity has a weight."""
        return cfg.w_mqm_span if any(cfg.severity_weights.model_dump().values()) else 0.0

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Record the token penalties, and which tokens the model has read."""
        add_span_penalties(reward, rollout, cfg, MQM, cfg.w_mqm_span)

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples; {} if none was requested."""
        if not any(MQM in reward.services for reward in rewards):
            return {}
        answers = [reward.answers[MQM] for reward in rewards if MQM in reward.answers]
        return {
            **mean_std("mqm_score", [answer.score for answer in answers]),
            "mqm_spans_mean": mean_of([len(answer.error_spans or ()) for answer in answers]),
            "mqm_unplaced_mean": mean_of([len(answer.unplaced or ()) for answer in answers]),
            **coverage_stats(MQM, rewards),
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return score, spans and errors without a position; {} if it was not requested."""
        if MQM not in reward.services:
            return {}
        return {
            "mqm_score": reward.score(MQM),
            "mqm_spans": _plain(reward, "error_spans"),
            "mqm_unplaced": _plain(reward, "unplaced"),
        }


class Omissions(RewardComponent):
    """Component: w_omission times the weights of omissions that `mqm` reports, on the last
    token."""

    name = "omissions"
    service = MQM
    higher_is_better = False
    optional = True
    table = (
        StatSpec(
            key="omissions_mean",
            title="omissions a segment",
            digits=2,
            better="lower",
            hidden_at=(None,),
            column="omit",
            form="6.2f",
            narrow=True,
            in_console=True,
            by_group=True,
            value_of_row=partial(_count, key="omissions"),
        ),
        StatSpec(
            key="omission_penalty_mean",
            title="penalty of omissions",
            digits=2,
            better="higher",
            hidden_at=(None,),
            column="om_pen",
            form="6.2f",
        ),
    )
    curves = (Curve.with_held_out("omissions a segment", "omissions_mean"),)

    def weight(self, cfg: RewardConfig) -> float:
        """Return w_omission, if any severity has a weight."""
        return cfg.w_omission if any(cfg.severity_weights.model_dump().values()) else 0.0

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add the penalty to the last token: the EOS, or the last one of a truncated completion."""
        if reward.token_rewards:
            penalty = omission_penalty(reward.answers[MQM], cfg)
            reward.token_rewards[-1] += cfg.w_omission * penalty

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples, before the weight; {} if none was requested."""
        if not any(MQM in reward.services for reward in rewards):
            return {}
        answers = [reward.answers[MQM] for reward in rewards if MQM in reward.answers]
        return {
            "omissions_mean": mean_of([len(answer.omissions or ()) for answer in answers]),
            "omission_penalty_mean": mean_of([omission_penalty(answer, cfg) for answer in answers]),
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the omitted parts of the source; {} if it was not requested."""
        return {"omissions": _plain(reward, "omissions")} if MQM in reward.services else {}


def omission_penalty(answer: Scored, cfg: RewardConfig) -> float:
    """Return the sum of the severities' weights of all omissions.

    Raises UserError for a severity without a weight.
    """
    weights = cfg.severity_weights.model_dump()
    return sum((severity_weight(o.severity, weights) for o in answer.omissions or ()), 0.0)


def _plain(reward: SampleReward, field: str) -> list[dict[str, Any]] | None:
    """Return a field of the answer for a dump; None if the sample has no answer."""
    answer = reward.answers.get(MQM)
    return (
        None if answer is None else [entry.model_dump() for entry in getattr(answer, field) or ()]
    )
