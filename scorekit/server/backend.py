"""The `Backend` protocol: what a model must implement to be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.endpoint import Endpoint, ModelDescription
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint


@dataclass(slots=True)
class Encoded:
    """A tokenized item.

    length: tokens of its longest sequence (what a batch is padded to); 1 where a batch is counted
        in items (a judge's LLM).
    rows: sequences it adds to a batch (xCOMET with a reference: 3).
    fields: what the outcome says about the input: for a translation `tokens`, `truncated`,
        `mt_covered`. Metrics count `tokens`, or `length` if there are none.
    payload: the backend's own (ids, options, ...).
    timeout_s: seconds granted by the request that is answered last, from its start; known when
        the item goes to `forward`. None: no request waits.
    is_wanted: returns whether a request still waits for the item; set while it is in `forward`.
        A backend that waits for another server asks it, and then gives a `cancelled` item up.
    worker: the worker that has its batch, if the backend has `spare_workers`.
    windows: of a sample in windows (`overlong: windows`), what the model scores in its place.
    """

    length: int
    fields: dict[str, Any]
    payload: Any
    rows: int = 1
    timeout_s: float | None = None
    is_wanted: Callable[[], bool] | None = None
    worker: Worker | None = None
    windows: Sequence[Encoded] = ()


class Worker(Protocol):
    """The one of a backend's workers that has a batch. Its methods may be called in any thread."""

    def release(self) -> None:
        """Let a spare worker take a batch, while this one only waits."""

    def resume(self) -> None:
        """Count the worker again; it does not wait for another to end."""


#: The fields of an item's outcome (a score and spans, a verdict, a vector), or its error.
Outcome = dict[str, Any] | SampleError


class Backend(Protocol):
    """A model behind a service.

    `encode` and `forward` run in different threads. `encode` of a model that scores translations
    runs in two threads at once, one of which splits texts into windows."""

    service: str

    @property
    def endpoint(self) -> Endpoint:
        """Return the endpoint that it serves."""

    def load(self) -> ModelDescription:
        """Load tokenizer and weights; called once, before anything else."""

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        """Tokenize. An item that the model cannot take gives a SampleError in its place."""

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the outcomes of a batch, in order. Raises only if the whole batch failed."""

    def probe(self, words: int) -> Any:
        """Return a valid item of at least that many tokens (before truncation).

        It is used to warm up, and to check whether the model still answers."""

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return the bytes that the model holds on its device now and held at most, and the
        device's size; None on a CPU."""


class ScoringBackend(Backend, Protocol):
    """A model that scores translations."""

    @property
    def endpoint(self) -> ScoreEndpoint:
        """Return the endpoint: its samples and options."""

    def load(self) -> ScoreDescription:
        """Load as every backend; the description also says what its scores mean."""


def workers_of(backend: Backend) -> int:
    """Return how many batches the backend processes at once: its `workers`, else 1.

    A backend that waits for another server, not for a local device, needs several to be busy. Each
    is a thread of the server, and calls `forward`."""
    return int(getattr(backend, "workers", 1))


def spare_workers_of(backend: Backend) -> int:
    """Return how many batches a backend may hold beside its `workers`, while as many of those only
    wait (`Worker.release`): its `spare_workers`, else 0."""
    return int(getattr(backend, "spare_workers", 0))


def translation_probe(words: int) -> TranslationSample:
    """Return a translation of about that many words on each side."""
    return TranslationSample(src="word " * words, mt="말 " * words)


def installed_versions(*distributions: str) -> dict[str, str | None]:
    """Return versions of distributions; None for one that is not installed."""
    version_by_name: dict[str, str | None] = {}
    for name in distributions:
        try:
            version_by_name[name] = version(name)
        except PackageNotFoundError:
            version_by_name[name] = None
    return version_by_name
