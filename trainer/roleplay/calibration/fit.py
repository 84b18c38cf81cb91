"""Fit anchors: cosines of pairs that belong together, and of shuffled pairs."""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from scorekit.client.embeddings import Embeddings
from scorekit.errors import SampleError, UserError
from scorekit.numeric import vector_error
from scorekit.seeds import stream_seed
from trainer.roleplay.calibration.anchors import CANARIES, Anchors, Calibration
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)

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
        "false grounded": _shuffled(answers, stream_seed("anchors", seed, "grounded")),
        "true reference": _adjacent(sampled, turns),
        "false reference": _shuffled(references, stream_seed("anchors", seed, "reference")),
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
    usable = sorted((turn for turn in turns if _text(turn.reference)), key=lambda turn: turn.id)
    if len(usable) <= rows:
        return usable
    return random.Random(stream_seed("anchors", seed, "rows")).sample(usable, rows)


def _text(text: str | None) -> bool:
    return text is not None and can_be_embedded(text)


def _answers(turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """Return pairs of user turns and their references."""
    return [(turn.user_turn, turn.reference or "") for turn in turns if _text(turn.user_turn)]


def _adjacent(sampled: Sequence[RoleplayTurn], turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """Return pairs of references of a character that follow each other in a dialogue.

    Without dialogues, they are of one character and scenario.
    """
    sampled_ids = {turn.id for turn in sampled}
    groups: dict[tuple[str | None, ...], list[RoleplayTurn]] = defaultdict(list)
    for turn in turns:
        if _text(turn.reference) and (turn.character_name or turn.dialogue):
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


def _shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
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
