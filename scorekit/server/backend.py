"""What a model has to do to be served: the `Backend` protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.description import Description
from scorekit.server.scoring import ScoreDescription, Scoring
from scorekit.server.verb import Verb


@dataclass(slots=True)
class Encoded:
    """A tokenised item.

    length: tokens of its longest sequence (what a batch is padded to); 1 where a batch is counted
        in items (a judge's LLM).
    rows: sequences it adds to a batch (xCOMET with a reference: 3).
    fields: what the outcome tells about the input: for a translation `tokens`, `truncated`,
        `mt_covered`. The figures count `tokens`, or `length` where there are none.
    payload: the backend's own (ids, options, ...).
    timeout_s: seconds that the request grants which is answered last, from its start; known when
        the item goes to `forward`. None: nobody waits.
    """

    length: int
    fields: dict[str, Any]
    payload: Any
    rows: int = 1
    timeout_s: float | None = None


#: What `forward` gives for one item: the outcome's fields (a score and spans, a verdict, a vector),
#: or the reason why that item has none.
Outcome = dict[str, Any] | SampleError


class Backend(Protocol):
    """A model behind a service. `encode` and `forward` run in different threads; `encode` of one
    that scores translations in two at once, of which one cuts texts into windows."""

    service: str

    @property
    def verb(self) -> Verb:
        """What it is asked, and how it answers."""
        ...

    def load(self) -> Description:
        """Load tokenizer and weights; called once, before anything else."""
        ...

    def encode(self, samples: Sequence[Any], options: Any) -> list[Encoded | SampleError]:
        """Tokenise. An item that the model cannot take gives a SampleError in its place."""
        ...

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Outcomes of a batch, in order. Raises only when the whole batch failed."""
        ...

    def probe(self, words: int) -> Any:
        """A valid item of at least that many tokens (before it is cut), to warm up with and to ask
        whether the model still answers."""
        ...

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Bytes that the model holds on its device now, and held at most, and that the device has;
        None on a CPU."""
        ...


class ScoringBackend(Backend, Protocol):
    """A model that scores."""

    @property
    def verb(self) -> Scoring:
        """Of which samples, with which options."""
        ...

    def load(self) -> ScoreDescription:
        """As every backend's; it says what its scores are."""
        ...


def workers_of(backend: Backend) -> int:
    """How many batches the backend works on at once: its `workers`, else one. One that waits for
    others, and not for a device of its own, is kept full by several, each a thread of the server;
    its `forward` is called from all of them."""
    return int(getattr(backend, "workers", 1))


def collectors_of(backend: Backend) -> Sequence[Any]:
    """Return Prometheus collectors of the backend's own: its `collectors`, else none."""
    return getattr(backend, "collectors", ())


def translation_probe(words: int) -> TranslationSample:
    """A translation of about that many words on each side."""
    return TranslationSample(src="word " * words, mt="말 " * words)


def installed_versions(*distributions: str) -> dict[str, str | None]:
    """Versions of distributions; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
