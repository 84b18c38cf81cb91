"""What a calibration is: two cosines for each use, the model that they hold for, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from pydantic import Field, ValidationError, field_validator, model_validator

from scorekit.client.embeddings import Canary, EmbeddingModel
from scorekit.config import Config, describe_faults
from scorekit.errors import SampleError, UserError
from scorekit.files import write_atomic
from scorekit.numeric.vectors import cosine, vector_fault

Use = Literal["grounded", "reference"]
USES: tuple[Use, ...] = ("grounded", "reference")
FILE = "calibration.json"
#: Their vectors are kept with the anchors. No server can be another model, or pool in another way,
#: and give the same ones; one travels with every request of a run.
CANARIES = (
    "오늘은 늦게까지 있을게요.",
    "창밖에는 비가 내리고 있었다.",
    "The kettle had gone cold an hour ago.",
    "어디로 가는 길이야? 같이 가자.",
)
#: Cosine to the kept vector. Precision of weights moves it by 1e-4, another pooling by far more.
_SAME = 0.995


@runtime_checkable
class Embedder(Protocol):
    """What anchors and similarities need of an embedding client (scorekit.client.embeddings)."""

    def info(self) -> EmbeddingModel:
        """Which model answers."""
        ...

    def embed(
        self, texts: Sequence[str], canary: Canary | None = None
    ) -> Sequence[Sequence[float] | SampleError]:
        """The vector of each text, or why it has none. canary: goes with every request."""
        ...

    def close(self) -> None:
        """Close its connections."""
        ...


class Anchors(Config):
    """Cosine `low` scores 0, `high` 1; between them linear, beyond them clipped.

    true_pairs, false_pairs: how many pairs they were fitted on. separation: the chance that a true
    pair is more alike than a false one (area under the ROC curve). true_cosines, false_cosines:
    counts in 40 equal bins from -1 to 1, for the page.
    """

    low: float = Field(ge=-1, le=1)
    high: float = Field(ge=-1, le=1)
    true_pairs: int = Field(0, ge=0)
    false_pairs: int = Field(0, ge=0)
    separation: float | None = Field(None, ge=0, le=1)
    true_cosines: list[int] = Field(default_factory=list)
    false_cosines: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _apart(self) -> Anchors:
        if self.high <= self.low:
            raise ValueError("high is the larger one")
        return self

    def score(self, cosine: float) -> float:
        """In [0, 1]."""
        return min(1.0, max(0.0, (cosine - self.low) / (self.high - self.low)))


class Calibration(Config):
    """Anchors, and the model that they hold for. None: its server did not tell.

    canaries: vectors of known texts.
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
            if fault := vector_fault(vector):
                raise ValueError(f"{fault}, of {text!r}: calibrate anew with a server that works")
        return canaries

    def anchors(self, use: Use) -> Anchors:
        """Those of one of the two functions."""
        return self.grounded if use == "grounded" else self.reference

    def write(self, path: Path) -> None:
        """As JSON."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    def fault_of_model(self, found: EmbeddingModel) -> str:
        """What the model that answers is not; "" where it is the one. Names are told, not compared:
        a server may have its model under any."""
        for what in ("dimension", "revision", "pooling"):
            ours, theirs = getattr(self, what), getattr(found, what)
            if ours is not None and theirs is not None and _plain(ours) != _plain(theirs):
                return f"{what} {theirs}, not {ours}"
        return ""

    def fault_of_canary(self, text: str, vector: Sequence[float]) -> str:
        """The same by the vector of a canary; "" where none is kept."""
        kept = self.canaries.get(text)
        if kept is None:
            return ""
        if len(kept) != len(vector):
            return f"vectors of {len(vector)} numbers, not {len(kept)}"
        if fault := vector_fault(vector):
            return fault
        alike = cosine(kept, vector)
        return "" if alike >= _SAME else f"another vector for a known text (cosine {alike:.3f})"


def _plain(told: object) -> str:
    """As servers write it in different ways: last_token, lasttoken."""
    return str(told).replace("_", "").casefold()


def read_calibration(path: Path) -> Calibration:
    """Raises UserError for a file that is none."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{path}: no calibration: {describe_faults(error)}") from None
