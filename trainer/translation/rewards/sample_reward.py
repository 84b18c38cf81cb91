"""The reward of one completion, with the results that it is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scorekit.schemas import ErrorSpan, Scored
from trainer.translation.rewards.reward_batch import ServiceName, is_truncated


class SpanPenalties(NamedTuple):
    """The weighted span penalty of each token from one service, and whether it has read the
    token."""

    penalties: list[float]
    covered: list[bool]


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
    values: what components computed from the text itself, by their names, before any weight.
    span_penalties: the span penalties of each service, and how far it read.
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
    answers: dict[ServiceName, Scored] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    span_penalties: dict[ServiceName, SpanPenalties] = field(default_factory=dict)
    text_error: str | None = None
    source_error: str | None = None
    service_error: str | None = None
    unweighted_error: str | None = None
    is_transient: bool = False
    overlong: Literal["truncated", "windowed", "skipped", "penalised"] | None = None

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
        span_lists = (answer.error_spans for answer in self.answers.values())
        return next((spans for spans in span_lists if spans is not None), None)

    @property
    def error(self) -> str | None:
        """Return why it has no score, or not all; None: it has."""
        return self.source_error or self.text_error or self.service_error or self.unweighted_error
