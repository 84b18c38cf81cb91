"""Rewards of single tokens, from the error spans and omissions that services mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scorekit.credit.spans import (
    combine_sources,
    covered_tokens,
    severity_weight,
    spans_to_token_rewards,
)
from scorekit.errors import UserError
from scorekit.rewards.definition import RewardDefinition, TokenRewardConfig
from scorekit.rewards.results import RewardResult
from scorekit.schemas import ErrorSpan, Scored


class TokenRewards(NamedTuple):
    """The rewards of a completion's tokens, beside the reward of its text.

    rewards: [T] of each token, already weighted.
    valid: [T] tokens to train on; False after the part that a model could read, if `uncovered` is
    exclude.
    uncovered: number of tokens after that part, excluded or not.
    """

    rewards: list[float]
    valid: list[bool]
    uncovered: int = 0


def token_rewards(
    definition: RewardDefinition,
    result: RewardResult,
    text: str,
    offsets: Sequence[tuple[int, int]],
) -> TokenRewards | None:
    """Return the rewards of the tokens of one completion, or None if the sample has no reward.

    result: of the sample, by `CompositeReward.score`.
    text: the translation that was scored (`mt`).
    offsets: [T] (start, end) of each token in it, as `spans_to_token_rewards` takes them.

    A sample has none, either, if a span is outside its text: the answer is of another one. A
    refused text, and a definition without weights of tokens, gives 0 for each token.

    Raises UserError for a severity without a weight, and where an answer has no error spans or
    omissions at all; ValueError for offsets that do not fit the text.
    """
    if result.reward is None:
        return None
    config = definition.token_rewards
    is_refused = any(result.components[name].status != "ok" for name in definition.required)
    if config is None or is_refused:
        return TokenRewards([0.0] * len(offsets), [True] * len(offsets))
    answers: dict[str, Any] = {name: result.components[name].answer for name in config.weighted}
    return token_rewards_of(config, answers, text, offsets)


def token_rewards_of(
    config: TokenRewardConfig,
    answers: Mapping[str, Any],
    text: str,
    offsets: Sequence[tuple[int, int]],
) -> TokenRewards | None:
    """Return the rewards of the tokens of one text that services have scored.

    answers: by component, at least those with a weight. Else as `token_rewards`.
    """
    rewards, all_valid = [0.0] * len(offsets), [True] * len(offsets)
    for name, weight in _weights(config, config.omissions):
        if rewards:
            rewards[-1] += weight * omission_penalty(name, answers[name], config)
    penalties_by_source, flags_by_source = [], []  # flags: which tokens the service has read
    for name, weight in _weights(config, config.spans):
        spans = _entries(name, answers[name], "error_spans")
        if any(not 0 <= span.start <= span.end <= len(text) for span in spans):
            return None
        penalties = spans_to_token_rewards(
            text,
            offsets,
            spans,
            config.severity_weights.model_dump(),
            config.overlap_policy,
            overlap_threshold=config.overlap_threshold,
            combine=config.combine,
            use_confidence=config.use_confidence,
        )
        penalties_by_source.append([weight * penalty for penalty in penalties])
        flags_by_source.append(covered_tokens(text, offsets, answers[name].mt_covered))
    if not penalties_by_source:
        return TokenRewards(rewards, all_valid)
    for token, penalty in enumerate(combine_sources(penalties_by_source, config.sources_combine)):
        rewards[token] += penalty
    is_read = [all(flags) for flags in zip(*flags_by_source, strict=True)]
    valid = is_read if config.uncovered == "exclude" else all_valid
    return TokenRewards(rewards, valid, is_read.count(False))


def omission_penalty(name: str, answer: Scored, config: TokenRewardConfig) -> float:
    """Return the sum of the severities' weights of all omissions of an answer.

    name: of the component, for errors. Raises UserError for a severity without a weight.
    """
    weights = config.severity_weights.model_dump()
    omissions = _entries(name, answer, "omissions")
    return sum((severity_weight(omission.severity, weights) for omission in omissions), 0.0)


def _weights(config: TokenRewardConfig, weights: dict[str, float]) -> list[tuple[str, float]]:
    return [
        (name, weight) for name, weight in weights.items() if name in config.weighted and weight
    ]


def _entries(name: str, answer: Scored, field: str) -> list[ErrorSpan]:
    entries: list[ErrorSpan] | None = getattr(answer, field, None)
    if entries is None:
        key = "spans" if field == "error_spans" else field
        raise UserError(
            f"components.{name}: the service marks no {field.replace('_', ' ')}. Name one that "
            f"does (xcomet, or a judge with task mqm), or take it out of token_rewards.{key}"
        )
    return entries
