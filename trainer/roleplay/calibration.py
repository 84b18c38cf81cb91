"""A calibration converts cosines to scores: two anchors for each use, valid for one model.

They are fitted on cosines of pairs that belong together, and of shuffled pairs.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from scorekit.client.embeddings import EmbeddingModel, Embeddings
from scorekit.config import Config, describe_validation_error
from scorekit.errors import SampleError, UserError
from scorekit.files import write_atomic
from scorekit.numeric import cosine, vector_error
from scorekit.seeds import stream_seed
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)
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

    def model_mismatch(self, actual_model: EmbeddingModel) -> str:
        """Return how the answering model differs from this calibration's; "" if it is the same.

        Names are reported, not compared: a server may use any name for its model.
        """
        for field in ("dimension", "revision", "pooling"):
            expected, actual = getattr(self, field), getattr(actual_model, field)
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


# -- the fit ---------------------------------------------------------------------------------------


Pair = tuple[str, str]
#: With fewer pairs the ends of a distribution are unknown.
LEAST_PAIRS = 20
#: Probability that a true pair is more similar than a false one: below the first an error, below
#: the second a warning.
_NO_SEPARATION, _LITTLE_SEPARATION = 0.55, 0.70
_HIGH_PERCENTILE = 90
_BINS = 40
#: False pairs for each true one, for an accurate median.
_SHUFFLES = 2


def fit(
    embedder: Embeddings, turns: Sequence[RoleplayTurn], *, rows: int, seed: int = 0
) -> Calibration:
    """Return a calibration for the model that answers.

    low: the median cosine of false pairs, so that half of the unrelated pairs score 0. high: the
    90th percentile of true pairs, so that the score does not saturate: nine of ten true pairs can
    still improve. True pairs of `grounded` are user turns and their references, of `reference`
    adjacent references of one character.

    rows: turns that are sampled.
    Raises UserError if there are too few pairs, or if true pairs are not more similar than false
    ones; and what the embedder raises.
    """
    sampled = _sample(turns, rows, seed)
    answers = _answers(sampled)
    if not answers:
        raise UserError(
            "reward.calibration: the training data has no references to fit anchors on. Make a "
            "calibration on other data (trainer roleplay calibrate), and name it"
        )
    references = [(text, text) for _, text in answers]
    pairs = {
        "true grounded": answers,
        "false grounded": _shuffle(answers, stream_seed("anchors", seed, "grounded")),
        "true reference": _adjacent(sampled, turns),
        "false reference": _shuffle(references, stream_seed("anchors", seed, "reference")),
    }
    texts = {text for pair_list in pairs.values() for pair in pair_list for text in pair}
    vectors = _vectors(embedder, [*CANARIES, *sorted(texts)])
    cosines = {name: _cosines(pair_list, vectors) for name, pair_list in pairs.items()}
    model = embedder.info()
    return Calibration(
        model=model.model,
        revision=model.revision,
        pooling=model.pooling,
        dimension=model.dimension,
        grounded=_fit_grounded(cosines["true grounded"], cosines["false grounded"]),
        reference=_fit_reference(cosines["true reference"], cosines["false reference"]),
        seed=seed,
        canaries={text: [float(x) for x in vectors[text]] for text in CANARIES},
    )


def _sample(turns: Sequence[RoleplayTurn], rows: int, seed: int) -> list[RoleplayTurn]:
    """Return a sample of turns with a reference; it does not depend on the order of the data."""
    usable = sorted(
        (turn for turn in turns if _is_usable(turn.reference)), key=lambda turn: turn.id
    )
    if len(usable) <= rows:
        return usable
    return random.Random(stream_seed("anchors", seed, "rows")).sample(usable, rows)


def _is_usable(text: str | None) -> bool:
    """Return whether there is a text, and it can be embedded."""
    return text is not None and can_be_embedded(text)


def _answers(turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """Return pairs of user turns and their references."""
    return [(turn.user_turn, turn.reference or "") for turn in turns if _is_usable(turn.user_turn)]


def _adjacent(sampled: Sequence[RoleplayTurn], turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """Return pairs of references of a character that follow each other in a dialogue.

    Without dialogues, they are of one character and scenario.
    """
    sampled_ids = {turn.id for turn in sampled}
    groups: dict[tuple[str | None, ...], list[RoleplayTurn]] = defaultdict(list)
    for turn in turns:
        if _is_usable(turn.reference) and (turn.character_name or turn.dialogue):
            story = ("dialogue", turn.dialogue) if turn.dialogue else ("scenario", turn.scenario)
            groups[(*story, turn.character_name)].append(turn)
    pairs = []
    for group in groups.values():
        group.sort(key=lambda turn: (turn.place is None, turn.place or 0, turn.id))
        pairs += [
            (first.reference or "", second.reference or "")
            for first, second in pairwise(group)
            if {first.id, second.id} & sampled_ids and first.reference != second.reference
        ]
    return pairs


def _shuffle(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Return pairs with shuffled second texts, none of which equals a text of its pair."""
    generator, false = random.Random(seed), []
    for _ in range(_SHUFFLES):
        order = list(range(len(pairs)))
        generator.shuffle(order)
        for index, other_index in zip(order, order[1:] + order[:1], strict=True):
            first, own_second = pairs[index]
            other = pairs[other_index][1]
            if other not in (own_second, first):
                false.append((first, other))
    return false


def _vectors(embedder: Embeddings, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the vectors of texts that the server accepts. Raises UserError for invalid vectors."""
    answers = embedder.embed(texts)
    for vector in answers:
        if not isinstance(vector, SampleError) and (problem := vector_error(vector)):
            raise UserError(f"reward.embedding_model: {problem}. See the server's log.")
    vectors = {
        text: np.asarray(vector, dtype=np.float64)
        for text, vector in zip(texts, answers, strict=True)
        if not isinstance(vector, SampleError)
    }
    missing = [text for text in CANARIES if text not in vectors]
    if missing:
        raise UserError("reward.embedding_model: the server refuses a simple sentence")
    return vectors


def _fit_grounded(true: np.ndarray, false: np.ndarray) -> Anchors:
    if min(len(true), len(false)) < LEAST_PAIRS:
        raise UserError(
            f"reward.calibration: {len(true)} turns with a reference and {len(false)} shuffled "
            f"pairs of them, at least {LEAST_PAIRS} are required. Use more turns, or name a "
            "calibration.json of other turns (trainer roleplay calibrate)"
        )
    anchors = _between(true, false, float(np.percentile(true, _HIGH_PERCENTILE)))
    description = _describe("user turns and their references", true, false)
    if anchors is None or anchors.separation is None or anchors.separation < _NO_SEPARATION:
        raise UserError(
            f"reward.calibration: {description}: this model cannot separate them. Use another "
            "one, or check the data (do the references answer their turns?)"
        )
    if anchors.separation < _LITTLE_SEPARATION:
        log.warning("calibration: %s: the separation is small", description)
    return anchors


def _fit_reference(true: np.ndarray, false: np.ndarray) -> Anchors:
    """Return the anchors of `reference`.

    If adjacent references are few, or not more similar than others, the upper anchor is the
    reference itself: cosine 1.
    """
    if len(true) >= LEAST_PAIRS:
        anchors = _between(true, false, float(np.percentile(true, _HIGH_PERCENTILE)))
        if anchors and anchors.separation is not None and anchors.separation >= _NO_SEPARATION:
            return anchors
        description = _describe("adjacent references", true, false)
    else:
        description = f"{len(true)} pairs of adjacent references, {LEAST_PAIRS} are the minimum"
    log.warning("calibration: %s: only the reference itself gets a full score", description)
    anchors = _between(true, false, 1.0)
    if anchors is None:
        raise UserError("reward.calibration: all references are equal for this model")
    return anchors


def _between(true: np.ndarray, false: np.ndarray, high: float) -> Anchors | None:
    """Return anchors from the median of the false pairs; None if that is not below `high`."""
    low = float(np.median(false))
    if high - low < 1e-3:
        return None
    return Anchors(
        low=low,
        high=high,
        true_pairs=len(true),
        false_pairs=len(false),
        separation=separation(true, false) if len(true) else None,
        true_cosines=_histogram(true),
        false_cosines=_histogram(false),
    )


def _describe(label: str, true: np.ndarray, false: np.ndarray) -> str:
    return (
        f"{label} are more alike than shuffled ones in {separation(true, false):.0%} of cases "
        f"(median cosine {np.median(true):.3f} and {np.median(false):.3f}, {len(true)} and "
        f"{len(false)} pairs)"
    )


def _cosines(pairs: Sequence[Pair], vectors: dict[str, np.ndarray]) -> np.ndarray:
    cosines = [
        _cosine(vectors[first], vectors[second])
        for first, second in pairs
        if first in vectors and second in vectors
    ]
    return np.array(cosines, dtype=np.float64)


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    length = math.sqrt(float(first @ first) * float(second @ second))
    return min(1.0, max(-1.0, float(first @ second) / length))


def separation(true: np.ndarray, false: np.ndarray) -> float:
    """Return the probability that a value of `true` is larger than one of `false`.

    A tie counts half (the area under the ROC curve; Mann and Whitney 1947).
    """
    ordered = np.sort(false)
    below = np.searchsorted(ordered, true, side="left")
    up_to = np.searchsorted(ordered, true, side="right")
    return float((below + up_to).sum() / (2 * len(true) * len(false)))


def _histogram(cosines: np.ndarray) -> list[int]:
    counts, _ = np.histogram(cosines, bins=_BINS, range=(-1.0, 1.0))
    return [int(count) for count in counts]
