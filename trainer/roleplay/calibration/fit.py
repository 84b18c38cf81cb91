"""Fit anchors: cosines of pairs that belong together, and of pairs that were shuffled."""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from scorekit.errors import SampleError, UserError
from scorekit.numeric.vectors import vector_fault
from scorekit.seeds import stream_seed
from trainer.roleplay.calibration.anchors import CANARIES, Anchors, Calibration, Embedder
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)

Pair = tuple[str, str]
#: Fewer pairs say nothing of a distribution's ends.
LEAST_PAIRS = 20
#: Chance that a true pair is more alike than a false one: below the first there is nothing to
#: score by, below the second a warning.
_NO_SEPARATION, _LITTLE_SEPARATION = 0.55, 0.70
_HIGH_PERCENTILE = 90
_BINS = 40
#: False pairs for each true one: their middle is to be known well.
_SHUFFLES = 2


def fit(
    embedder: Embedder, turns: Sequence[RoleplayTurn], *, rows: int, seed: int = 0
) -> Calibration:
    """Anchors for the model that answers.

    low: the median cosine of false pairs, so that half of what has nothing to do with each other
    earns nothing. high: the 90th percentile of true pairs, so that the score does not saturate:
    nine of ten true pairs still have something to gain. True pairs of `grounded` are user turns and
    their references, of `reference` neighbouring references of one character.

    rows: turns that are drawn. Raises UserError if too few pairs are there, or true ones are not
    more alike than false ones; and what the embedder raises.
    """
    drawn = _drawn(turns, rows, seed)
    answers = _answers(drawn)
    if not answers:
        raise UserError(
            "reward.calibration: the training data has no references to fit anchors on: make a "
            "calibration on data that has (trainer roleplay calibrate), and name it"
        )
    references = [(text, text) for _, text in answers]
    pairs = {
        "true grounded": answers,
        "false grounded": _shuffled(answers, stream_seed("anchors", seed, "grounded")),
        "true reference": _neighbours(drawn, turns),
        "false reference": _shuffled(references, stream_seed("anchors", seed, "reference")),
    }
    texts = {text for of in pairs.values() for pair in of for text in pair}
    vectors = _vectors(embedder, [*CANARIES, *sorted(texts)])
    found = {name: _cosines(of, vectors) for name, of in pairs.items()}
    model = embedder.info()
    return Calibration(
        model=model.model,
        revision=model.revision,
        pooling=model.pooling,
        dimension=model.dimension,
        grounded=_fit_grounded(found["true grounded"], found["false grounded"]),
        reference=_fit_reference(found["true reference"], found["false reference"]),
        seed=seed,
        canaries={text: [float(x) for x in vectors[text]] for text in CANARIES},
    )


def _drawn(turns: Sequence[RoleplayTurn], rows: int, seed: int) -> list[RoleplayTurn]:
    """Turns with a reference; the same ones whatever the order of the data."""
    usable = sorted((turn for turn in turns if _text(turn.reference)), key=lambda turn: turn.id)
    if len(usable) <= rows:
        return usable
    return random.Random(stream_seed("anchors", seed, "rows")).sample(usable, rows)


def _text(text: str | None) -> bool:
    return text is not None and can_be_embedded(text)


def _answers(turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """What the player says, and the reference to it."""
    return [(turn.user_turn, turn.reference or "") for turn in turns if _text(turn.user_turn)]


def _neighbours(drawn: Sequence[RoleplayTurn], turns: Sequence[RoleplayTurn]) -> list[Pair]:
    """References of two turns of one character that follow each other in a dialogue; where no
    dialogues are told, of one character and scenario."""
    wanted = {turn.id for turn in drawn}
    groups: dict[tuple[str | None, ...], list[RoleplayTurn]] = defaultdict(list)
    for turn in turns:
        if _text(turn.reference) and (turn.character_name or turn.dialogue):
            story = ("dialogue", turn.dialogue) if turn.dialogue else ("scenario", turn.scenario)
            groups[(*story, turn.character_name)].append(turn)
    pairs = []
    for group in groups.values():
        group.sort(key=lambda turn: (turn.place is None, turn.place or 0, turn.id))
        pairs += [
            (one.reference or "", other.reference or "")
            for one, other in pairwise(group)
            if {one.id, other.id} & wanted and one.reference != other.reference
        ]
    return pairs


def _shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """The second texts dealt out anew: none to its own, nor one that is equal to its own."""
    chance, false = random.Random(seed), []
    for _ in range(_SHUFFLES):
        order = list(range(len(pairs)))
        chance.shuffle(order)
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            first, own = pairs[here]
            other = pairs[there][1]
            if other not in (own, first):
                false.append((first, other))
    return false


def _vectors(embedder: Embedder, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Of the texts that the server takes. Raises UserError for what is no vector."""
    found = embedder.embed(texts)
    for vector in found:
        if not isinstance(vector, SampleError) and (fault := vector_fault(vector)):
            raise UserError(f"reward.embedding_model: {fault}. Look at the server's log.")
    vectors = {
        text: np.asarray(vector, dtype=np.float64)
        for text, vector in zip(texts, found, strict=True)
        if not isinstance(vector, SampleError)
    }
    missing = [text for text in CANARIES if text not in vectors]
    if missing:
        raise UserError("reward.embedding_model: the server refuses a plain sentence")
    return vectors


def _fit_grounded(true: np.ndarray, false: np.ndarray) -> Anchors:
    if min(len(true), len(false)) < LEAST_PAIRS:
        raise UserError(
            f"reward.calibration: {len(true)} turns with a reference and {len(false)} shuffled "
            f"pairs of them, {LEAST_PAIRS} are the least: give more turns, or name a "
            "calibration.json of others (trainer roleplay calibrate)"
        )
    found = _between(true, false, float(np.percentile(true, _HIGH_PERCENTILE)))
    told = _told("user turns and their references", true, false)
    if found is None or found.separation is None or found.separation < _NO_SEPARATION:
        raise UserError(
            f"reward.calibration: {told}: this model tells nothing there; take another, or look at "
            "the data (do the references answer their turns?)"
        )
    if found.separation < _LITTLE_SEPARATION:
        log.warning("calibration: %s: little to score by", told)
    return found


def _fit_reference(true: np.ndarray, false: np.ndarray) -> Anchors:
    """Where neighbours are few, or no nearer than others, the upper anchor is the reference itself:
    cosine 1."""
    if len(true) >= LEAST_PAIRS:
        found = _between(true, false, float(np.percentile(true, _HIGH_PERCENTILE)))
        if found and found.separation is not None and found.separation >= _NO_SEPARATION:
            return found
        told = _told("neighbouring references", true, false)
    else:
        told = f"{len(true)} pairs of neighbouring references, {LEAST_PAIRS} are the least"
    log.warning("calibration: %s: a full score of reference is the reference itself", told)
    found = _between(true, false, 1.0)
    if found is None:
        raise UserError("reward.calibration: all references are alike to this model")
    return found


def _between(true: np.ndarray, false: np.ndarray, high: float) -> Anchors | None:
    """From the middle of the false pairs; None where that is not below `high`."""
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


def _told(what: str, true: np.ndarray, false: np.ndarray) -> str:
    return (
        f"{what} are more alike than shuffled ones in {separation(true, false):.0%} of cases "
        f"(median cosine {np.median(true):.3f} and {np.median(false):.3f}, {len(true)} and "
        f"{len(false)} pairs)"
    )


def _cosines(pairs: Sequence[Pair], vectors: dict[str, np.ndarray]) -> np.ndarray:
    found = [
        _cosine(vectors[one], vectors[other])
        for one, other in pairs
        if one in vectors and other in vectors
    ]
    return np.array(found, dtype=np.float64)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    length = math.sqrt(float(one @ one) * float(other @ other))
    return min(1.0, max(-1.0, float(one @ other) / length))


def separation(true: np.ndarray, false: np.ndarray) -> float:
    """The chance that one of `true` is larger than one of `false`, a tie counting half (the area
    under the ROC curve; Mann and Whitney 1947)."""
    ordered = np.sort(false)
    below = np.searchsorted(ordered, true, side="left")
    up_to = np.searchsorted(ordered, true, side="right")
    return float((below + up_to).sum() / (2 * len(true) * len(false)))


def _histogram(cosines: np.ndarray) -> list[int]:
    counts, _ = np.histogram(cosines, bins=_BINS, range=(-1.0, 1.0))
    return [int(count) for count in counts]
