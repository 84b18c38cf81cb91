"""A calibration: two cosines for each use, the model that they are valid for, and the file
format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from scorekit.client.embeddings import EmbeddingModel
from scorekit.config import Config, describe_validation_error
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.numeric import cosine, vector_error

Use = Literal["grounded", "reference"]
USES: tuple[Use, ...] = ("grounded", "reference")
FILE = "calibration.json"
#: Their vectors are stored with the anchors. No other model or pooling gives the same ones. One is
#: sent with every request of a run.
CANARIES = (
    "오늘은 늦게까지 있을게요.",
    "창밖에는 비가 내리고 있었다.",
    "The kettle had gone cold an hour ago.",
    "어디로 가는 길이야? 같이 가자.",
)
#: Least cosine to the stored vector. The precision of weights changes it by 1e-4, another pooling
#: by far more.
_MIN_CANARY_COSINE = 0.995


class Anchors(Config):
    """Cosine `low` scores 0, `high` scores 1; linear between them, clipped beyond.

    true_pairs, false_pairs: number of pairs that they were fitted on.
    separation: the probability that a true pair is more similar than a false one (area under the
    ROC curve).
    true_cosines, false_cosines: counts in 40 equal bins from -1 to 1, for the page.
    """

    low: float = Field(ge=-1, le=1)
    high: float = Field(ge=-1, le=1)
    true_pairs: int = Field(0, ge=0)
    false_pairs: int = Field(0, ge=0)
    separation: float | None = Field(None, ge=0, le=1)
    true_cosines: list[int] = Field(default_factory=list)
    false_cosines: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_order(self) -> Anchors:
        if self.high <= self.low:
            raise ValueError("high must be larger than low")
        return self

    def score(self, cosine: float) -> float:
        """Return the score of a cosine, in [0, 1]."""
        return min(1.0, max(0.0, (cosine - self.low) / (self.high - self.low)))


class Calibration(Config):
    """Anchors, and the model that they are valid for. None: its server did not report it.

    canaries: vectors of fixed texts.
    """

    version: Literal[1] = 1
    model: str
    revision: str | None = None
    pooling: str | None = None
    dimension: int = Field(ge=1)
    grounded: Anchors
    reference: Anchors
    seed: int = 0
    canaries: dict[str, list[float]] = Field(default_factory=dict)

    @field_validator("canaries")
    @classmethod
    def _vectors(cls, canaries: dict[str, list[float]]) -> dict[str, list[float]]:
        for text, vector in canaries.items():
            if problem := vector_error(vector):
                raise ValueError(f"{problem}, of {text!r}. Calibrate again with a correct server")
        return canaries

    def anchors(self, use: Use) -> Anchors:
        """Return the anchors of one of the two functions."""
        return self.grounded if use == "grounded" else self.reference

    def write(self, path: Path) -> None:
        """Write the calibration as JSON."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    def model_mismatch(self, answering: EmbeddingModel) -> str:
        """Return how the answering model differs from this calibration's; "" if it is the same.

        Names are reported, not compared: a server may use any name for its model.
        """
        for field in ("dimension", "revision", "pooling"):
            expected, actual = getattr(self, field), getattr(answering, field)
            if expected is not None and actual is not None and _plain(expected) != _plain(actual):
                return f"{field} {actual}, not {expected}"
        return ""

    def canary_mismatch(self, text: str, vector: Sequence[float]) -> str:
        """Return how a canary's vector differs from the stored one; "" without a stored one."""
        stored = self.canaries.get(text)
        if stored is None:
            return ""
        if len(stored) != len(vector):
            return f"vectors of {len(vector)} numbers, not {len(stored)}"
        if problem := vector_error(vector):
            return problem
        similarity = cosine(stored, vector)
        return (
            ""
            if similarity >= _MIN_CANARY_COSINE
            else f"another vector for a fixed text (cosine {similarity:.3f})"
        )


def _plain(value: object) -> str:
    """Return a comparable form: servers write last_token or lasttoken."""
    return str(value).replace("_", "").casefold()


def read_calibration(path: Path) -> Calibration:
    """Return the calibration of a file. Raises UserError for another file."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{path}: not a calibration: {describe_validation_error(error)}") from None
