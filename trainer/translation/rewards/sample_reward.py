"""The rewards of completions by the formula of scorekit.rewards, and the advantages of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from scorekit.errors import TEXT_ERROR_TYPES, UserError
from scorekit.rewards import (
    ComponentResult,
    RewardDefinition,
    RewardResult,
    TokenRewards,
    token_rewards,
)
from scorekit.rewards.definition import ComponentConfig
from scorekit.rewards.results import compose, missing_component
from scorekit.rewards.rules import LocalRule
from scorekit.rewards.services import service_component
from scorekit.schemas import ErrorSpan, Failed, JudgeScored, Result, Scored
from trainer.rl.advantage import TokenAdvantages, pad_rows
from trainer.rl.batch_advantages import batch_advantages
from trainer.rl.config import RLConfig
from trainer.rl.rollout import Rollout
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import BAD_SOURCE, Scores, ServiceName, is_truncated
from trainer.translation.rewards.short_form import formula_of, rules_of
from trainer.translation.rollouts import TranslationRollout

Results = dict[ServiceName, Result]


@dataclass(slots=True)
class SampleReward:
    """The reward of one completion.

    r_seq: sequence reward. None: a service failed, the source cannot be scored, or the text is
    overlong and skipped; the sample then takes no part in the update, nor in its mean and
    deviation.
    token_rewards: of each token, already weighted.
    valid: tokens to train on; False after the part that the span model could read, if
    `reward.uncovered` excludes them.
    uncovered_tokens: number of tokens after that part, excluded or not.
    services: services that were requested for this sample.
    answers: of those that scored it.
    values: of the local rules (guards, chrF), by the names of their components, before any weight.
    text_error: why the text cannot be scored.
    source_error: why no translation of its source can be scored.
    service_error: why a service gave no score.
    unweighted_error: why a service without a weight gave none, which has no effect.
    is_transient: whether the service may score the same sample later.
    overlong: how a text over a model's limit was handled (`reward.overlong`).
    """

    r_seq: float | None
    token_rewards: list[float]
    valid: list[bool]
    uncovered_tokens: int = 0
    services: tuple[ServiceName, ...] = ()
    answers: dict[ServiceName, Scored | JudgeScored] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    text_error: str | None = None
    source_error: str | None = None
    service_error: str | None = None
    unweighted_error: str | None = None
    is_transient: bool = False
    overlong: Literal["truncated", "windowed", "skipped", "penalised"] | None = None

    def answer(self, service: ServiceName) -> Scored | None:
        """Return what a service says of the translation; None if it was not asked or failed, or
        gives a verdict."""
        answer = self.answers.get(service)
        return answer if isinstance(answer, Scored) else None

    def score(self, service: ServiceName) -> float | None:
        """Return a model's own score; None if it was not asked or failed."""
        answer = self.answers.get(service)
        return None if answer is None else answer.score

    def truncated(self, service: ServiceName) -> bool | None:
        """Return whether a model read less than the full source and translation.

        None if it was not asked or failed.
        """
        answer = self.answers.get(service)
        return None if answer is None else is_truncated(answer)

    @property
    def error_spans(self) -> list[ErrorSpan] | None:
        """Return the spans of the first service that marks them (xCOMET before mqm).

        None if none was asked or it failed.
        """
        answers = (answer for answer in self.answers.values() if isinstance(answer, Scored))
        span_lists = (answer.error_spans for answer in answers)
        return next((spans for spans in span_lists if spans is not None), None)

    @property
    def error(self) -> str | None:
        """Return why it has no score, or not all; None: it has."""
        return self.source_error or self.text_error or self.service_error or self.unweighted_error


def compute_rewards(
    rollouts: Sequence[TranslationRollout], scores: Scores, cfg: RewardConfig
) -> list[SampleReward]:
    """Return the rewards of raw answers, by `formula_of` the config.

    r_seq is the sum of the parts with a weight, or `text_error_reward` if the text cannot be
    scored (minus no_eos_penalty if it was truncated), or None if a service failed, the source
    cannot be scored, or an overlong text is skipped. Raises UserError for a severity without a
    weight, for a scorer without spans that a weight needs, and for a row without a reference that
    w_chrf needs.
    """
    formula = formula_of(cfg)
    samples = [rollout.reward_fields for rollout in rollouts]
    rules = {
        name: LocalRule(f"reward.{name}", config).evaluate(samples, ())
        for name, config in rules_of(cfg).items()
    }
    rewards = []
    for index, rollout in enumerate(rollouts):
        results = {name: scores.results[name][index] for name in scores.results}
        local = {name: parts[index] for name, parts in rules.items()}
        rewards.append(_sample_reward(rollout, results, local, formula, cfg))
    return rewards


def _sample_reward(
    rollout: TranslationRollout,
    results: Results,
    local: dict[str, ComponentResult],
    formula: RewardDefinition | None,
    cfg: RewardConfig,
) -> SampleReward:
    tokens = len(rollout.completion_token_ids)
    reward = SampleReward(None, [0.0] * tokens, [True] * tokens, services=tuple(results))
    _note_results(reward, results, cfg, () if formula is None else formula.required)
    for name, part in local.items():
        if part.raw is not None:
            reward.values[name] = part.raw
        elif part.weight:
            raise UserError(f"{rollout.example_id}: reward.{name}: {part.message}")
    if formula is None:
        reward.r_seq = 0.0
        return reward
    components = local | {
        name: _component(config, results.get(name))
        for name, config in formula.components.items()
        if config.service is not None
    }
    result = compose(formula, components, {})
    reward.r_seq = result.reward
    if result.reward is None and reward.error is None:
        reward.service_error = result.reason
    credit = _token_rewards(formula, result, rollout, cfg)
    if credit is not None:
        reward.token_rewards, reward.valid, reward.uncovered_tokens = credit
    elif result.reward is not None:
        reward.r_seq = None
        reward.service_error = "model_failure: an error span is outside the translation"
    return reward


def _component(config: ComponentConfig, result: Result | None) -> ComponentResult:
    if result is None:
        return missing_component(config, "skipped", "the service was not asked")
    return service_component(config, result)


def _token_rewards(
    formula: RewardDefinition, result: RewardResult, rollout: TranslationRollout, cfg: RewardConfig
) -> TokenRewards | None:
    """Return `token_rewards`. Raises UserError with the config's key if a scorer has no spans."""
    spans = formula.token_rewards.spans if formula.token_rewards is not None else {}
    for name in spans:
        answer = result.components[name].answer
        if isinstance(answer, Scored) and answer.error_spans is None:
            label = {"xcomet": "xCOMET"}.get(name, name)
            raise UserError(
                f"the {label} scorer gives no error spans. Set reward.w_{name}_span to 0"
            )
    return token_rewards(formula, result, rollout.completion_text, rollout.token_char_offsets)


def _note_results(
    reward: SampleReward, results: Results, cfg: RewardConfig, needed: Collection[ServiceName]
) -> None:
    """Record the services' scores and errors.

    needed: services with a weight.
    """
    text_errors: dict[str, str] = {}  # type -> message
    for name, result in results.items():
        if not isinstance(result, Failed):
            reward.answers[name] = result
            if is_truncated(result):
                reward.overlong = "truncated"
            elif isinstance(result, Scored) and result.windows and reward.overlong is None:
                reward.overlong = "windowed"
        elif name not in needed:
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


def rollout_advantages(
    rollouts: Sequence[Rollout], rewards: Sequence[SampleReward], rl: RLConfig
) -> TokenAdvantages:
    """Return advantages of samples that all have a reward, with the options of `rl`."""
    rewards_B = torch.tensor([reward.r_seq for reward in rewards], dtype=torch.float64)
    token_rewards_BT = pad_rows([reward.token_rewards for reward in rewards])
    mask_BT = pad_rows([reward.valid for reward in rewards], torch.bool)
    return batch_advantages(rollouts, rewards_B, token_rewards_BT, mask_BT, rl)
