"""Reward components of the judge's `mqm` task: errors in the translation, and omissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from scorekit.credit.spans import severity_weight
from scorekit.schemas import Scored
from trainer.runs.stats import Curve, Stats, StatSpec, mean_of, mean_std
from trainer.translation.rewards.component import RewardComponent, coverage_stats, score_stat
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import MQM
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.span_penalties import SpanComponent
from trainer.translation.rollouts import TranslationRollout


def _count(line: Mapping[str, Any], key: str) -> float | None:
    entries = line.get(key)
    return None if entries is None else len(entries)


def _count_stat(key: str, title: str, column: str = "", *, in_console: bool = False) -> StatSpec:
    """Return the mean number of entries of a list in the dump.

    in_console: whether it is printed for an evaluation, and in the table by groups.
    """
    return StatSpec(
        key=f"{key}_mean",
        title=title,
        digits=2,
        better="lower",
        hidden_at=(None,),
        column=column,
        form="6.2f",
        narrow=bool(column),
        in_console=in_console,
        by_group=in_console,
        value_of_row=partial(_count, key=key),
    )


class MQMSpans(SpanComponent):
    """Component: w_mqm_span times the penalty of each token inside a span of `mqm`."""

    name = "mqm_spans"
    weight_key = "w_mqm_span"
    service = MQM
    higher_is_better = False
    optional = True
    table = (
        score_stat(MQM, "MQM score", "lower", "mqm", hidden_at=(None,), narrow=False),
        _count_stat("mqm_spans", "MQM errors a segment", column="mqm_sp"),
        _count_stat("mqm_unplaced", "MQM errors without a position"),
        StatSpec(key="mqm_coverage", title="MQM coverage", better="higher", hidden_at=(None,)),
    )
    curves = (Curve.with_held_out("MQM errors a segment", "mqm_spans_mean"),)

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples."""
        answers = _answers(rewards)
        return {
            **mean_std("mqm_score", [answer.score for answer in answers]),
            "mqm_spans_mean": mean_of([len(answer.error_spans or ()) for answer in answers]),
            "mqm_unplaced_mean": mean_of([len(answer.unplaced or ()) for answer in answers]),
            **coverage_stats(MQM, rewards),
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return score, spans and errors without a position."""
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
        _count_stat("omissions", "omissions a segment", column="omit", in_console=True),
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
        return cfg.weight_of_spans(cfg.w_omission)

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add the penalty to the last token: the EOS, or the last one of a truncated completion."""
        if reward.token_rewards:
            penalty = omission_penalty(reward.answers[MQM], cfg)
            reward.token_rewards[-1] += cfg.w_omission * penalty

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples, before the weight."""
        answers = _answers(rewards)
        return {
            "omissions_mean": mean_of([len(answer.omissions or ()) for answer in answers]),
            "omission_penalty_mean": mean_of([omission_penalty(answer, cfg) for answer in answers]),
        }

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the omitted parts of the source."""
        return {"omissions": _plain(reward, "omissions")}


def _answers(rewards: Sequence[SampleReward]) -> list[Scored]:
    return [reward.answers[MQM] for reward in rewards if MQM in reward.answers]


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
