"""What the judge's `mqm` finds: errors in the translation, and what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from scorekit.schemas import Scored
from trainer.runs.figures import Curve, Figure, Figures, mean_of, mean_std
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.credit import severity_weight
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.score_batch import MQM
from trainer.translation.rewards.span_charges import charge_spans
from trainer.translation.rewards.term import Term, reading_figures
from trainer.translation.rollouts import TranslationRollout


def _count(line: Mapping[str, Any], key: str) -> float | None:
    found = line.get(key)
    return None if found is None else len(found)


class MQMSpans(Term):
    """w_mqm_span times the penalty of each token inside a span of `mqm`."""

    name = "mqm_spans"
    service = MQM
    higher_is_better = False
    optional = True
    table = (
        Figure(
            key="mqm_score_mean",
            title="MQM score",
            better="lower",
            hidden_at=(None,),
            column="mqm",
            said=True,
            by_group=True,
            coverage="mqm_coverage",
            of_line=lambda line: line.get("mqm_score"),
        ),
        Figure(
            key="mqm_spans_mean",
            title="MQM errors a segment",
            digits=2,
            better="lower",
            hidden_at=(None,),
            column="mqm_sp",
            form="6.2f",
            narrow=True,
            of_line=partial(_count, key="mqm_spans"),
        ),
        Figure(
            key="mqm_unplaced_mean",
            title="MQM errors without a place",
            digits=2,
            better="lower",
            hidden_at=(None,),
            of_line=partial(_count, key="mqm_unplaced"),
        ),
        Figure(key="mqm_coverage", title="MQM coverage", better="higher", hidden_at=(None,)),
    )
    curves = (
        Curve(title="MQM errors a segment", keys=("mqm_spans_mean",), held_out="mqm_spans_mean"),
    )

    def weight(self, cfg: RewardConfig) -> float:
        """w_mqm_span, where any severity has a weight."""
        return cfg.w_mqm_span if any(cfg.severity_weights.model_dump().values()) else 0.0

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """To the tokens; and which of them the model has read."""
        charge_spans(reward, rollout, cfg, MQM, cfg.w_mqm_span)

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """Of the samples that it scored; none where it is not asked."""
        if not any(MQM in reward.asked for reward in rewards):
            return {}
        found = [reward.answers[MQM] for reward in rewards if MQM in reward.answers]
        return {
            **mean_std("mqm_score", [answer.score for answer in found]),
            "mqm_spans_mean": mean_of([len(answer.error_spans or ()) for answer in found]),
            "mqm_unplaced_mean": mean_of([len(answer.unplaced or ()) for answer in found]),
            **reading_figures(MQM, rewards),
        }

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """Score, spans and errors without a place; nothing where it was not asked."""
        if MQM not in reward.asked:
            return {}
        return {
            "mqm_score": reward.score(MQM),
            "mqm_spans": _plain(reward, "error_spans"),
            "mqm_unplaced": _plain(reward, "unplaced"),
        }


class Omissions(Term):
    """w_omission times the weights of what `mqm` finds left out, on the token that ended it."""

    name = "omissions"
    service = MQM
    higher_is_better = False
    optional = True
    table = (
        Figure(
            key="omissions_mean",
            title="omissions a segment",
            digits=2,
            better="lower",
            hidden_at=(None,),
            column="omit",
            form="6.2f",
            narrow=True,
            said=True,
            by_group=True,
            of_line=partial(_count, key="omissions"),
        ),
        Figure(
            key="omission_penalty_mean",
            title="penalty of omissions",
            digits=2,
            better="higher",
            hidden_at=(None,),
            column="om_pen",
            form="6.2f",
        ),
    )
    curves = (
        Curve(title="omissions a segment", keys=("omissions_mean",), held_out="omissions_mean"),
    )

    def weight(self, cfg: RewardConfig) -> float:
        """w_omission, where any severity has a weight."""
        return cfg.w_omission if any(cfg.severity_weights.model_dump().values()) else 0.0

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """To the last token: the EOS, or that at which the completion was cut."""
        if reward.token_rewards:
            penalty = omission_penalty(reward.answers[MQM], cfg)
            reward.token_rewards[-1] += cfg.w_omission * penalty

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """Of the samples that were scored, before the weight; none where it is not asked."""
        if not any(MQM in reward.asked for reward in rewards):
            return {}
        found = [reward.answers[MQM] for reward in rewards if MQM in reward.answers]
        return {
            "omissions_mean": mean_of([len(answer.omissions or ()) for answer in found]),
            "omission_penalty_mean": mean_of([omission_penalty(answer, cfg) for answer in found]),
        }

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """The stretches of the source; nothing where it was not asked."""
        return {"omissions": _plain(reward, "omissions")} if MQM in reward.asked else {}


def omission_penalty(answer: Scored, cfg: RewardConfig) -> float:
    """The severities' weights of all omissions, summed. Raises UserError on a severity without a
    weight."""
    weights = cfg.severity_weights.model_dump()
    return sum((severity_weight(o.severity, weights) for o in answer.omissions or ()), 0.0)


def _plain(reward: SampleReward, field: str) -> list[dict[str, Any]] | None:
    """For a dump; None where the sample has no answer."""
    answer = reward.answers.get(MQM)
    return None if answer is None else [one.model_dump() for one in getattr(answer, field) or ()]
