"""One protocol for local and remote scorers: `score_batch(samples, cfg) -> RewardOutput`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from scorekit.config import Config, check_config
from scorekit.errors import SampleError, UserError
from scorekit.schemas import Failed, JudgeScored, Overlong, Result, Scored


@dataclass(frozen=True, slots=True)
class SampleForScoring:
    """A translation to score. `ref` None or "": quality estimation.

    src_lang, tgt_lang: codes, tags or English names.
    task: a judge's task that scores translations (mqm).
    id: the caller's name for the sample, which its result has, too."""

    src: str
    mt: str
    ref: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    task: str | None = None
    id: str | None = None

    def wire(self) -> dict[str, Any]:
        """Return the sample as a request carries it, without empty fields."""
        sample = {"src": self.src, "mt": self.mt}
        for name in ("id", "ref", "src_lang", "tgt_lang", "task"):
            value = getattr(self, name)
            is_empty = value is None or (isinstance(value, str) and not value)
            if not is_empty:
                sample[name] = value
        return sample


_SAMPLE_FIELDS = tuple(field.name for field in fields(SampleForScoring))


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


#: A sample as an object, or as a dict with its fields.
ScorerSample = SampleForScoring | Mapping[str, Any]


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores translations."""

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Score in order; a failed sample has None in its place."""


def as_samples(samples: Iterable[ScorerSample]) -> list[SampleForScoring]:
    """Return samples of objects or dicts. Raises UserError that names the first that is wrong."""
    check_is_list("samples", samples)
    return [_as_sample(index, sample) for index, sample in enumerate(samples)]


def check_is_list(name: str, values: Any) -> None:
    """Raise UserError for a single text or sample, or nothing, where a list is expected."""
    is_single = isinstance(values, str | bytes | Mapping | SampleForScoring)
    if is_single or not isinstance(values, Iterable):
        raise UserError(f"{name}: a {type(values).__name__}. Give a list of {name}")


def _as_sample(index: int, sample: ScorerSample) -> SampleForScoring:
    if isinstance(sample, Mapping):
        values = dict(sample)
    elif isinstance(sample, SampleForScoring):
        values = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    else:
        kind = type(sample).__name__
        raise UserError(f"samples.{index}: a {kind}. Give a dict with src and mt")
    for name, value in values.items():
        if name not in _SAMPLE_FIELDS:
            names = ", ".join(_SAMPLE_FIELDS)
            raise UserError(f"samples.{index}: unknown field {name!r}. Choose from {names}")
        if not isinstance(value, str) and (value is not None or name in ("src", "mt")):
            kind = type(value).__name__
            raise UserError(f"samples.{index}.{name}: a {kind}. Give a text")
    for name in ("src", "mt"):
        if name not in values:
            raise UserError(f"samples.{index}: {name} is missing. Give src and mt")
    return sample if isinstance(sample, SampleForScoring) else SampleForScoring(**values)


def as_scoring_config(cfg: ScoringConfig | Mapping[str, Any] | None) -> ScoringConfig:
    """Return the options for a batch of an object, a dict or nothing. Raises UserError."""
    if isinstance(cfg, ScoringConfig):
        return cfg
    return check_config(ScoringConfig, {} if cfg is None else cfg, "cfg")


def reward_output(results: Sequence[Result]) -> RewardOutput:
    """Return the results of a service that scores translations as a RewardOutput."""
    translations = [r for r in results if not isinstance(r, JudgeScored)]
    if len(translations) < len(results):
        raise UserError("a judge's verdicts are not scores of translations. Use another service")
    return RewardOutput([r.score if r.ok else None for r in translations], translations)


def raise_for_failures(results: Sequence[Result]) -> list[Scored | JudgeScored]:
    """Return the results if all succeeded. Raises SampleError with the first failure's id and
    index, UserError for what is no list of results: nobody could say that those succeeded."""
    check_is_list("results", results)
    for index, result in enumerate(results):
        if not isinstance(result, Scored | JudgeScored | Failed):
            kind = type(result).__name__
            raise UserError(f"results.{index}: a {kind}. Give what `score` returned")
        if isinstance(result, Failed):
            error = result.error
            raise SampleError.of_answer(
                error.type, error.message, id=result.id, index=index, retryable=error.retryable
            )
    return [result for result in results if not isinstance(result, Failed)]
