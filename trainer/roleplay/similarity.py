"""Similarities of texts from an embedding server, and the anchors that convert them to scores.

If the server is unavailable, or has another model than the calibration, the run ends: there is no
other way to compute a score. Before the run the error is a UserError; during the run it is the
client's error after its retries, and the run ends with a checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scorekit.client.embeddings import Canary, Embeddings
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    SampleError,
    ServiceUnreachable,
    UserError,
)
from scorekit.numeric import cosine, vector_error
from trainer.roleplay.calibration.anchors import CANARIES, FILE, Calibration, Use, read_calibration
from trainer.roleplay.calibration.fit import fit
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)

#: Timeout in seconds of the first request; during a run the client waits longer.
_REACH_S = 10.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """An embedding server that was started for the run.

    exit_reason: returns why its process has ended; None while it runs.
    """

    url: str
    exit_reason: Callable[[], str | None]


class Similarity:
    """Cosines from one embedding server. Threads may share it.

    The last vectors are cached: of two functions that are called on one batch, the first requests
    the texts of both.
    """

    def __init__(self, embedder: Embeddings, calibration: Calibration) -> None:
        self.embedder = embedder
        self.calibration = calibration
        self._lock = threading.Lock()
        self._vectors: dict[str, Sequence[float] | None] = {}

    def cosines(
        self, pairs: Sequence[tuple[str, str]], extra_texts: Iterable[str] = ()
    ) -> list[float | None]:
        """Return the cosine of each pair; None if one of its texts cannot be embedded.

        extra_texts: texts to embed in the same requests, because they are needed next.
        Raises ServiceUnreachable if the server is gone, or has another model than the calibration;
        RequestError if it refuses every text.
        """
        texts = {*(text for pair in pairs for text in pair), *extra_texts}
        with self._lock:
            if not texts <= self._vectors.keys():
                self._vectors = self._embedded(texts)
            vectors = self._vectors
        return [_cosine(vectors[first], vectors[second]) for first, second in pairs]

    def score(self, use: Use, cosine: float | None) -> float | None:
        """Return the score between the anchors, in [0, 1]; None for None."""
        return None if cosine is None else self.calibration.anchors(use).score(cosine)

    def check_server(self) -> None:
        """Raise ServiceUnreachable if another model answers."""
        if problem := self.calibration.model_mismatch(self.embedder.info()):
            raise self._mismatch_error(problem)
        for text, vector in zip(CANARIES, self.embedder.embed(CANARIES), strict=True):
            if isinstance(vector, SampleError):
                raise vector
            self._check(vector)
            if problem := self.calibration.canary_mismatch(text, vector):
                raise self._mismatch_error(problem)

    def _embedded(self, texts: set[str]) -> dict[str, Sequence[float] | None]:
        embeddable = sorted(text for text in texts if can_be_embedded(text))
        vector_by_text: dict[str, Sequence[float] | None] = dict.fromkeys(texts)
        if not embeddable:
            return vector_by_text
        vectors = self.embedder.embed(embeddable, Canary(CANARIES[0], self._check_canary))
        for text, vector in zip(embeddable, vectors, strict=True):
            if not isinstance(vector, SampleError):
                self._check(vector)
                vector_by_text[text] = vector
            elif vector.type not in TEXT_ERROR_TYPES:
                raise vector
        return vector_by_text

    def _check_canary(self, vector: Sequence[float]) -> str:
        problem = self.calibration.canary_mismatch(CANARIES[0], vector)
        return problem and self._mismatch_message(problem)

    def _check(self, vector: Sequence[float]) -> None:
        if len(vector) != self.calibration.dimension:
            dimension = self.calibration.dimension
            raise self._mismatch_error(f"a vector of {len(vector)} numbers, not {dimension}")
        if problem := vector_error(vector):
            raise self._mismatch_error(problem)

    def _mismatch_message(self, problem: str) -> str:
        return f"not the model of this run's calibration ({self.calibration.model}): {problem}"

    def _mismatch_error(self, problem: str) -> ServiceUnreachable:
        return ServiceUnreachable(
            "the embedding server", self._mismatch_message(problem), retryable=False
        )


def _cosine(first: Sequence[float] | None, second: Sequence[float] | None) -> float | None:
    return None if first is None or second is None else cosine(first, second)


def open_similarity(
    cfg: RewardConfig,
    turns: Sequence[RoleplayTurn] | None,
    folder: Path | None,
    *,
    server: OwnServer | None = None,
    seed: int = 0,
) -> Similarity:
    """Connect to the embedding server, and compare it with the calibration.

    The calibration is that of `folder` (a resumed run), else `reward.calibration`, else it is
    fitted on `turns`. It is then written to `folder`, if there is one.
    server: the one that was started for a folder of weights.
    Raises UserError for a server that is unavailable, has another model, or returns invalid
    vectors.
    """
    embedder = reach(cfg, server)
    try:
        similarity = Similarity(embedder, _calibration(cfg, turns, folder, embedder, seed))
        similarity.check_server()
    except (ServiceUnreachable, RequestError, SampleError) as error:
        embedder.close()
        raise UserError(f"reward.embedding_model: {error}") from None
    except UserError:
        embedder.close()
        raise
    if folder is not None and not (folder / FILE).exists():
        similarity.calibration.write(folder / FILE)
    return similarity


def reach(cfg: RewardConfig, server: OwnServer | None = None) -> Embeddings:
    """Return a client of the embedding server, which has answered.

    Raises UserError if it does not answer, or if the section names no URL.
    """
    address = cfg.embedding_model if server is None else server.url
    if server is None and not cfg.is_url:
        raise UserError(
            f"reward.embedding_model: {address} is no URL, and no server was started for it"
        )
    try:
        with Embeddings(address, deadline_s=_REACH_S, first_answer_s=_REACH_S) as probe:
            probe.info()
    except (ServiceUnreachable, RequestError, UserError) as error:
        raise UserError(f"reward.embedding_model: {error}") from None
    if server is None:
        return Embeddings(address, batch_size=cfg.embedding_batch_size)
    return Embeddings(address, batch_size=cfg.embedding_batch_size, exit_reason=server.exit_reason)


def _calibration(
    cfg: RewardConfig,
    turns: Sequence[RoleplayTurn] | None,
    folder: Path | None,
    embedder: Embeddings,
    seed: int,
) -> Calibration:
    configured = read_calibration(cfg.calibration) if cfg.calibration else None
    if folder is not None and (folder / FILE).exists():
        frozen = read_calibration(folder / FILE)
        if configured is not None and configured != frozen:
            raise UserError(f"reward.calibration: the run uses another one, {folder / FILE}")
        return frozen
    if configured is not None:
        return configured
    if turns is None:
        raise UserError(
            "reward.calibration: required. Name a calibration.json (see trainer roleplay calibrate)"
        )
    return fit(embedder, turns, rows=cfg.calibration_rows, seed=seed)
