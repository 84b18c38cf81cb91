"""The base class of reward components.

Each component has a file in the folder `components`, and an entry in its `__init__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trainer.runs.stats import Curve, Stats, StatSpec, mean_of, mean_std
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rollouts import TranslationRollout


class RewardComponent:
    """A reward component: weight, request, formula and stats. Subclasses define them."""

    #: Its key in `reward.terms`, if the config has no separate key for its weight (`weight_key`).
    name: str
    weight_key: str | None = None
    #: The service whose answers it uses; None: it uses the text only.
    service: ServiceName | None = None
    #: The direction of that service's score that its formula assumes.
    higher_is_better = True
    #: If True, a component without a weight has no column, and its service, which may charge for
    #: each request, is not requested. Without a request it has no stats and fields (`is_shown`).
    optional = False
    #: Its stats, in the order of display, and its charts.
    table: tuple[StatSpec, ...] = ()
    curves: tuple[Curve, ...] = ()

    def weight(self, cfg: RewardConfig) -> float:
        """Return the weight; 0: it is not a part of the reward, and its service is not requested
        for it."""
        if self.weight_key is None:
            return cfg.terms.get(self.name, 0.0)
        return float(getattr(cfg, self.weight_key))

    def inspect_text(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Record values of the text in `reward.values`, whether it can be scored or not."""

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add to `reward.r_seq` (not None here) or `reward.token_rewards`.

        Called for samples that every service with a weight has scored.
        """

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats for a line of log.jsonl or eval.jsonl."""
        return {}

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return fields for a line of a dump of completions."""
        return {}

    def is_shown(self, rewards: Sequence[SampleReward]) -> bool:
        """Return whether it has stats and fields: if its service is optional, only if that was
        requested for one of these samples."""
        is_optional = self.optional and self.service is not None
        return not is_optional or any(self.service in reward.services for reward in rewards)


class TextComponent(RewardComponent):
    """A value of the text itself, times its weight. Subclasses implement `value`."""

    def value(self, rollout: TranslationRollout) -> float:
        """Return the value of one translation, before the weight."""
        raise NotImplementedError

    def inspect_text(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Record the value, if the component has a weight."""
        if self.weight(cfg):
            reward.values[self.name] = self.value(rollout)

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add weight * value."""
        reward.r_seq = (reward.r_seq or 0.0) + self.weight(cfg) * reward.values[self.name]

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return `{name}_mean` and `{name}_std` over all samples; {} without a weight."""
        if not self.weight(cfg):
            return {}
        return mean_std(self.name, [reward.values[self.name] for reward in rewards])

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the value under the component's name."""
        return {self.name: reward.values[self.name]} if self.name in reward.values else {}


class ScoreComponent(RewardComponent):
    """A service's score of the full translation, times its weight."""

    service: ServiceName

    def value_of_score(self, score: float, cfg: RewardConfig) -> float:
        """Return the value of a score, before the weight; by default the score itself."""
        return score

    def add_reward(
        self, reward: SampleReward, rollout: TranslationRollout, cfg: RewardConfig
    ) -> None:
        """Add weight * value, if the service has scored the sample."""
        score = reward.score(self.service)
        if reward.r_seq is not None and score is not None:
            reward.r_seq += self.weight(cfg) * self.value_of_score(score, cfg)

    def score_stats(self, scores: Sequence[float], cfg: RewardConfig) -> Stats:
        """Return the stats of the scores that a service gave."""
        return mean_std(f"{self.service}_score", scores)

    def stats(self, rewards: Sequence[SampleReward], cfg: RewardConfig) -> Stats:
        """Return stats of the scored samples."""
        scores = [score for r in rewards if (score := r.score(self.service)) is not None]
        return self.score_stats(scores, cfg) | coverage_stats(self.service, rewards)

    def dump_fields(self, reward: SampleReward) -> dict[str, Any]:
        """Return the score, and whether the model read the full text."""
        return {
            f"{self.service}_score": reward.score(self.service),
            f"{self.service}_truncated": reward.truncated(self.service),
        }


def score_stat(
    service: ServiceName,
    title: str,
    better: Literal["higher", "lower"],
    column: str,
    *,
    hidden_at: tuple[float | None, ...] = (),
    narrow: bool = True,
    ranks: str = "",
) -> StatSpec:
    """Return the mean of a service's scores, with its coverage, for console and tables."""
    return StatSpec(
        key=f"{service}_score_mean",
        title=title,
        better=better,
        hidden_at=hidden_at,
        column=column,
        narrow=narrow,
        in_console=True,
        by_group=True,
        coverage=f"{service}_coverage",
        value_of_row=lambda line: line.get(f"{service}_score"),
        ranks=ranks,
    )


def coverage_stats(service: ServiceName, rewards: Sequence[SampleReward]) -> Stats:
    """Return `{service}_coverage` and `{service}_truncated_frac`.

    The share of the requested samples that it scored; and the share of those that the model could
    not read completely.
    """
    flags = [reward.truncated(service) for reward in rewards if service in reward.services]
    return {
        f"{service}_coverage": mean_of([flag is not None for flag in flags]),
        f"{service}_truncated_frac": mean_of([flag for flag in flags if flag is not None]),
    }
