"""Similarities of texts by an embedding server, and the anchors that make scores of them.

A server that is not there, or is another than the calibration's, ends the run: there is no other
way to a score. Before the run that is a UserError; within it, what the client raises after its
second tries, for the run to end with a checkpoint.
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
from scorekit.numeric.vectors import cosine, vector_fault
from trainer.roleplay.calibration.anchors import (
    CANARIES,
    FILE,
    Calibration,
    Embedder,
    Use,
    read_calibration,
)
from trainer.roleplay.calibration.fit import fit
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.turn import RoleplayTurn

log = logging.getLogger(__name__)

#: Seconds to find the server before a run; within it the client waits longer.
_REACH_S = 10.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """An embedding server that was started for the run. ended: why it will not answer any more;
    None while its process goes on."""

    url: str
    ended: Callable[[], str | None]


class Similarity:
    """Cosines by one embedding server. Threads may share it.

    What was asked for last stays: of two functions that are called on one batch the first asks for
    the texts of both.
    """

    def __init__(self, embedder: Embedder, calibration: Calibration) -> None:
        self.embedder = embedder
        self.calibration = calibration
        self._lock = threading.Lock()
        self._vectors: dict[str, Sequence[float] | None] = {}

    def cosines(
        self, pairs: Sequence[tuple[str, str]], beside: Iterable[str] = ()
    ) -> list[float | None]:
        """The cosine of each pair; None where a text of it cannot be embedded. beside: texts that
        are asked about in the same requests, since they are needed next.

        Raises ServiceUnreachable if the server is gone, or is not the calibration's any more;
        RequestError where it refuses every text.
        """
        texts = {*(text for pair in pairs for text in pair), *beside}
        with self._lock:
            if not texts <= self._vectors.keys():
                self._vectors = self._embedded(texts)
            vectors = self._vectors
        return [_cosine(vectors[one], vectors[other]) for one, other in pairs]

    def score(self, use: Use, cosine: float | None) -> float | None:
        """Between the anchors, in [0, 1]; None of None."""
        return None if cosine is None else self.calibration.anchors(use).score(cosine)

    def _embedded(self, texts: set[str]) -> dict[str, Sequence[float] | None]:
        wanted = sorted(text for text in texts if can_be_embedded(text))
        found: dict[str, Sequence[float] | None] = dict.fromkeys(texts)
        if not wanted:
            return found
        vectors = self.embedder.embed(wanted, Canary(CANARIES[0], self._fault_of_canary))
        for text, vector in zip(wanted, vectors, strict=True):
            if not isinstance(vector, SampleError):
                self._check(vector)
                found[text] = vector
            elif vector.type not in TEXT_ERROR_TYPES:
                raise vector
        return found

    def _fault_of_canary(self, vector: Sequence[float]) -> str:
        fault = self.calibration.fault_of_canary(CANARIES[0], vector)
        return fault and self._another(fault)

    def _check(self, vector: Sequence[float]) -> None:
        if len(vector) != self.calibration.dimension:
            known = self.calibration.dimension
            raise self._other(f"a vector of {len(vector)} numbers, not {known}")
        if fault := vector_fault(vector):
            raise self._other(fault)

    def _another(self, fault: str) -> str:
        return f"not the model of this run's calibration ({self.calibration.model}): {fault}"

    def _other(self, fault: str) -> ServiceUnreachable:
        return ServiceUnreachable("the embedding server", self._another(fault), retryable=False)


def _cosine(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    return None if one is None or other is None else cosine(one, other)


def open_similarity(
    cfg: RewardConfig,
    turns: Sequence[RoleplayTurn] | None,
    folder: Path | None,
    *,
    server: OwnServer | None = None,
    seed: int = 0,
) -> Similarity:
    """Reach the embedding server, and hold it against the calibration.

    The calibration is that of `folder` (a run that goes on), else `reward.calibration`, else it is
    fitted on `turns`; it stands in `folder` then, where one is given. server: that was started for
    a folder of weights.

    Raises UserError for a server that is not there, is another model, or gives what is no vector.
    """
    embedder = reach(cfg, server)
    try:
        calibration = _calibration(cfg, turns, folder, embedder, seed)
        _check_server(embedder, calibration)
    except (ServiceUnreachable, RequestError, SampleError) as error:
        embedder.close()
        raise UserError(f"reward.embedding_model: {error}") from None
    except UserError:
        embedder.close()
        raise
    if folder is not None and not (folder / FILE).exists():
        calibration.write(folder / FILE)
    return Similarity(embedder, calibration)


def reach(cfg: RewardConfig, server: OwnServer | None = None) -> Embeddings:
    """A client of the embedding server, which has answered. Raises UserError if it does not, or
    the section names no URL."""
    address = cfg.embedding_model if server is None else server.url
    if server is None and not cfg.is_url:
        raise UserError(
            f"reward.embedding_model: {address} is no URL, and no server was started for it"
        )
    try:
        with Embeddings(address, deadline_s=_REACH_S) as probe:
            probe.info()
    except (ServiceUnreachable, RequestError, UserError) as error:
        raise UserError(f"reward.embedding_model: {error}") from None
    if server is None:
        return Embeddings(address, batch_size=cfg.embedding_batch_size)
    return Embeddings(address, batch_size=cfg.embedding_batch_size, ended=server.ended)


def _calibration(
    cfg: RewardConfig,
    turns: Sequence[RoleplayTurn] | None,
    folder: Path | None,
    embedder: Embedder,
    seed: int,
) -> Calibration:
    given = read_calibration(cfg.calibration) if cfg.calibration else None
    if folder is not None and (folder / FILE).exists():
        frozen = read_calibration(folder / FILE)
        if given is not None and given != frozen:
            raise UserError(f"reward.calibration: the run has another in {folder / FILE}")
        return frozen
    if given is not None:
        return given
    if turns is None:
        raise UserError(
            "reward.calibration: name a calibration.json (trainer roleplay calibrate makes one)"
        )
    return fit(embedder, turns, rows=cfg.calibration_rows, seed=seed)


def _check_server(embedder: Embedder, calibration: Calibration) -> None:
    """Raises ServiceUnreachable if another model answers."""
    similarity = Similarity(embedder, calibration)
    if fault := calibration.fault_of_model(embedder.info()):
        raise similarity._other(fault)
    for text, vector in zip(CANARIES, embedder.embed(CANARIES), strict=True):
        if isinstance(vector, SampleError):
            raise vector
        similarity._check(vector)
        if fault := calibration.fault_of_canary(text, vector):
            raise similarity._other(fault)
