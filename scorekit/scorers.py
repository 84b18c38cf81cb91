"""One protocol for local and remote scorers: `score_batch(samples, cfg) -> RewardOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from scorekit.config import Config
from scorekit.errors import SampleError, UserError
from scorekit.schemas import Failed, JudgeScored, Overlong, Result, Scored


@dataclass(frozen=True, slots=True)
class SampleForScoring:
    """A translation to score. `ref` None or "": quality estimation.

    src_lang, tgt_lang: codes, tags or English names. task: a judge's task that scores translations
    (mqm)."""

    src: str
    mt: str
    ref: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    task: str | None = None

    def wire(self) -> dict[str, Any]:
        """Return the sample as a request carries it, without empty fields."""
        sample = {"src": self.src, "mt": self.mt}
        for name in ("ref", "src_lang", "tgt_lang", "task"):
            if value := getattr(self, name):
                sample[name] = value
        return sample


@dataclass(slots=True)
class RewardOutput:
    """Scores of a batch, in the order of its samples.

    sequence_scores: the model's own scores; None where a sample failed (never 0).
    metadata: the full result of each sample: spans, coverage, or the error.
    """

    sequence_scores: list[float | None]
    metadata: list[Scored | Failed] = field(default_factory=list)


class ScoringConfig(Config):
    """Options for scoring a batch; a key that is left out keeps the service's default."""

    batch_size: int = Field(
        64, ge=1, description="Samples a request (remote) or a batch at most (in process)."
    )
    overlong: Overlong = Field(
        "truncate",
        description="Inputs over the limit: cut and flagged, a failed sample, or scored in windows "
        "of sentences.",
    )
    max_input_length: int | None = Field(None, ge=16, description="Limit in tokens.")
    cache: bool = Field(True, description="Use the service's score cache.")

    def options(self) -> dict[str, Any]:
        """Return the `options` of a request."""
        return self.model_dump(include={"overlong", "max_input_length", "cache"})


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores translations."""

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place."""


def reward_output(results: Sequence[Result]) -> RewardOutput:
    """Return the results of a service that scores translations as a RewardOutput."""
    translations = [r for r in results if not isinstance(r, JudgeScored)]
    if len(translations) < len(results):
        raise UserError("a judge's verdicts are not scores of translations. Use another service")
    return RewardOutput([r.score if r.ok else None for r in translations], translations)


def raise_for_failures(results: Sequence[Result]) -> list[Scored | JudgeScored]:
    """Return the results if all succeeded. Raises SampleError with the first failure's id and
    index."""
    for index, result in enumerate(results):
        if isinstance(result, Failed):
            error = result.error
            raise SampleError(
                error.type, error.message, id=result.id, index=index, retryable=error.retryable
            )
    return [result for result in results if not isinstance(result, Failed)]
