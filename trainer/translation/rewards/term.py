"""A part of the reward. Each is a file of the folder `terms`, and a line of its `__init__`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.runs.figures import Curve, Figure, Figures, mean_of, mean_std
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.score_batch import ServiceName
from trainer.translation.rollouts import TranslationRollout


class Term:
    """A part of the reward: weight, request, formula, figures. Subclasses say what is theirs."""

    #: What `reward.terms` weighs it by, where the config has no key of its own for it.
    name: str
    #: The service whose answers it is made of; None: it looks at the text alone.
    service: ServiceName | None = None
    #: The direction of that service's score which its formula takes for granted.
    higher_is_better = True
    #: Whether it shows and costs nothing without a weight: no column, and no question to a service
    #: that may be paid for each.
    optional = False
    #: Its figures, in the order in which they are shown, and its pictures.
    table: tuple[Figure, ...] = ()
    curves: tuple[Curve, ...] = ()

    def weight(self, cfg: RewardConfig) -> float:
        """0: it is no part of the reward, and its service is not asked for it."""
        return cfg.terms.get(self.name, 0.0)

    def look(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """Note in `reward.values` what the text shows, whether it can be scored or not."""

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """Add to `reward.r_seq` (a number by now) or `reward.token_rewards`. Called for samples
        that every service with a weight has scored."""

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """For a line of log.jsonl or eval.jsonl."""
        return {}

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """For a line of a dump of completions."""
        return {}


class TextTerm(Term):
    """A value of the text itself, times its weight: subclasses give `value`."""

    def value(self, rollout: TranslationRollout) -> float:
        """What one translation is worth, before the weight."""
        raise NotImplementedError

    def look(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """The value, where the term has a weight."""
        if self.weight(cfg):
            reward.values[self.name] = self.value(rollout)

    def earn(self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig) -> None:
        """weight * value."""
        reward.r_seq = (reward.r_seq or 0.0) + self.weight(cfg) * reward.values[self.name]

    def figures(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Figures:
        """`{name}_mean` and `{name}_std` over all samples; of a term without weight none."""
        if not self.weight(cfg):
            return {}
        return mean_std(self.name, [reward.values[self.name] for reward in rewards])

    def dumped(self, reward: SampleReward) -> dict[str, Any]:
        """The value under the term's name."""
        return {self.name: reward.values[self.name]} if self.name in reward.values else {}


def reading_figures(service: ServiceName, rewards: Sequence[SampleReward]) -> Figures:
    """`{service}_coverage`: share of the samples it was asked for that it scored;
    `{service}_truncated_frac`: share of those that the model could not read whole."""
    flags = [reward.truncated(service) for reward in rewards if service in reward.asked]
    return {
        f"{service}_coverage": mean_of([flag is not None for flag in flags]),
        f"{service}_truncated_frac": mean_of([flag for flag in flags if flag is not None]),
    }


def reading_dump(service: ServiceName, reward: SampleReward) -> dict[str, Any]:
    """`{service}_score` and `{service}_truncated`."""
    return {
        f"{service}_score": reward.score(service),
        f"{service}_truncated": reward.truncated(service),
    }
