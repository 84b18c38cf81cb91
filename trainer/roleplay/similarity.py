"""Similarities of texts from an embedding server, and the anchors that convert them to scores.

If the server is unavailable, or has another model than the calibration, the run ends: there is no
other way to compute a score. Before the run the error is a UserError; during the run it is the
client's error after its retries, and the run ends with a checkpoint. The server is that of the
config's URL, or a process that is started for a folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scorekit.client import SyncScoringClient
from scorekit.client.embeddings import Canary, Embeddings
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    SampleError,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.retry import TELL_AFTER_S, Deadline, clock_time
from scorekit.numeric import cosine, vector_error
from scorekit.processes import end_with_parent, same_modules
from trainer.roleplay.calibration import CANARIES, FILE, Calibration, Use, fit, read_calibration
from trainer.roleplay.reply import can_be_embedded
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.turn import RoleplayTurn

messages = logging.getLogger(__name__)

#: Timeout in seconds of the first request; during a run the client waits longer.
_REACH_S = 10.0


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
                self._vectors = self._embed(texts)
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

    def _embed(self, texts: set[str]) -> dict[str, Sequence[float] | None]:
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


def _calibration(
    cfg: RewardConfig,
    turns: Sequence[RoleplayTurn] | None,
    folder: Path | None,
    embedder: Embeddings,
    seed: int,
) -> Calibration:
    from_config = read_calibration(cfg.calibration) if cfg.calibration else None
    if folder is not None and (folder / FILE).exists():
        of_run = read_calibration(folder / FILE)
        if from_config is not None and from_config != of_run:
            raise UserError(f"reward.calibration: the run uses another one, {folder / FILE}")
        return of_run
    if from_config is not None:
        return from_config
    if turns is None:
        raise UserError(
            "reward.calibration: required. Name a calibration.json (see trainer roleplay calibrate)"
        )
    return fit(embedder, turns, rows=cfg.calibration_rows, seed=seed)


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


# -- the server of a folder ------------------------------------------------------------------------


#: Longest time in seconds to load a model, and for a service to end by itself.
READY_S, STOP_S = 900.0, 15.0
#: Longest time in seconds from the end of its connections to that of the process.
_ENDS_S = 0.5


@dataclass(frozen=True, slots=True)
class OwnServer:
    """An embedding server that was started for the run.

    exit_reason: returns why its process has ended; None while it runs.
    """

    url: str
    exit_reason: Callable[[], str | None]


@contextmanager
def embedder_of(cfg: RewardConfig, log: Path) -> Iterator[OwnServer | None]:
    """Run a server for the section's folder: `scorekit serve embedder` on a free port.

    It ends with this process in any case. Yields None if the section names a URL.
    log: the file of its output.
    Raises UserError if the folder does not exist, or the server does not become ready.
    """
    model = cfg.embedding_model
    if cfg.is_url:
        yield None
        return
    if not Path(model).is_dir():
        raise UserError(
            f"reward.embedding_model: {model}: no such folder. Name a sentence-transformers "
            "folder, or the URL of an embedder"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _start(Path(model), log)
    try:
        url = _wait_ready(process, model, log)
        yield OwnServer(url, lambda: _exit_reason(process, log))
    finally:
        _end(process)


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.embedder", "--model", str(folder.resolve())]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | same_modules(),
            start_new_session=True,  # Ctrl-C then only reaches the run, which stops the server
            preexec_fn=end_with_parent(),
        )


def _wait_ready(process: subprocess.Popen[bytes], model: str, log: Path) -> str:
    """Return its URL when it answers."""
    deadline, has_logged = Deadline(READY_S), False
    while deadline.remaining_s() and process.poll() is None:
        if not has_logged and READY_S - deadline.remaining_s() >= TELL_AFTER_S:
            has_logged, until = True, clock_time(deadline.remaining_s())
            message = "reward.embedding_model: %s is loading. The run waits until %s. Its log: %s"
            messages.warning(message, model, until, log)
        url = _url_in(log)
        if url is None:
            time.sleep(0.05)
            continue
        with SyncScoringClient(url) as client:
            try:
                client.wait_ready(1.0)
                return url
            except ServiceUnreachable:
                continue
    state = "does not become ready" if process.poll() is None else "ended"
    raise UserError(f"reward.embedding_model: {model}: its embedder {state}; {_end_of(log)}")


def _exit_reason(process: subprocess.Popen[bytes], log: Path) -> str | None:
    """Return why the embedder will not answer any more; None while it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its port before it ends
        return f"exit code {process.wait(_ENDS_S)}; {_end_of(log)}"
    return None


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the end of {log}: {' '.join(lines[-3:])}"


def _url_in(log: Path) -> str | None:
    """Return its URL, which it writes to its log."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"listening"' in line:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError):
                return None
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then SIGKILL to the remaining processes of its session."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
