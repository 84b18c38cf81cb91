"""What one completion earned, and what was found on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scorekit.schemas import ErrorSpan, Scored
from trainer.translation.rewards.score_batch import ServiceName, is_truncated


class SpanCharge(NamedTuple):
    """What the error spans of one service take off each token, weighted, and whether it has read
    the token."""

    penalties: list[float]
    covered: list[bool]


@dataclass(slots=True)
class SampleReward:
    """What one completion earned.

    r_seq: sequence reward; None: a service failed, the source is at fault, or the text is overlong
    and skipped: the sample takes no part in the update, nor in its mean and deviation.
    token_rewards: of each token, already weighted.
    valid: tokens to learn from; False behind what the span model could read, where
    `reward.uncovered` excludes them.
    uncovered_tokens: tokens behind what the span model could read, excluded or not.
    asked: services that were asked for this sample. answers: of those that scored it.
    values: what terms found in the text itself, by their names, before any weight.
    span_charges: what the spans of each service take, and how far it read.
    text_error: why the text could not be scored by its own fault; source_error: why no translation
    of its source can be; service_error: why a service gave no score; shown_error: why one that has
    no weight in the reward gave none, which costs nothing. may_pass: whether the service may score
    the same sample later.
    overlong: what became of a text over a model's limit (`reward.overlong`).
    """

    r_seq: float | None
    token_rewards: list[float]
    valid: list[bool]
    uncovered_tokens: int = 0
    asked: tuple[ServiceName, ...] = ()
    answers: dict[ServiceName, Scored] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    span_charges: dict[ServiceName, SpanCharge] = field(default_factory=dict)
    text_error: str | None = None
    source_error: str | None = None
    service_error: str | None = None
    shown_error: str | None = None
    may_pass: bool = False
    overlong: Literal["truncated", "windowed", "skipped", "penalised"] | None = None

    def score(self, service: ServiceName) -> float | None:
        """A model's own score; None where it was not asked or failed."""
        answer = self.answers.get(service)
        return None if answer is None else answer.score

    def truncated(self, service: ServiceName) -> bool | None:
        """Whether a model read less than the whole source and translation; None where it was not
        asked or failed."""
        answer = self.answers.get(service)
        return None if answer is None else is_truncated(answer)

    @property
    def error_spans(self) -> list[ErrorSpan] | None:
        """Those of the first service that marks them (xCOMET before mqm); None where none was asked
        or it failed."""
        found = (answer.error_spans for answer in self.answers.values())
        return next((spans for spans in found if spans is not None), None)

    @property
    def error(self) -> str | None:
        """Why it has no score, or not all; None: it has."""
        return self.source_error or self.text_error or self.service_error or self.shown_error
