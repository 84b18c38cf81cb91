"""Which back end searches an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scorekit.errors import SampleError, UserError
from services.retriever.backends.bm25 import Bm25Searcher
from services.retriever.backends.dense import DenseSearcher
from services.retriever.backends.hybrid import NAME as HYBRID
from services.retriever.backends.hybrid import HybridSearcher
from services.retriever.backends.late import LateSearcher
from services.retriever.backends.ranking import Scores


class Searcher(Protocol):
    """Scores all pages of an index. name: of the back end.

    `read` runs in one thread; `scores` in others, in several at once where servers are asked.
    """

    name: str

    def check(self) -> None:
        """Refuse what cannot be searched now: another model behind the URL. Raises UserError."""
        ...

    def read(self, query: str) -> Any:
        """What `scores` needs of a query."""
        ...

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """Of each query as `read` gave it."""
        ...


class Servers(NamedTuple):
    """Where the models are that give queries their vectors. model: its name there; None: the one
    that the index names. key: of the pooling server."""

    embeddings_url: str | None = None
    embeddings_model: str | None = None
    late_url: str | None = None
    late_model: str | None = None
    late_key: str | None = None


def open_searcher(
    name: str | None, state: Path, kept: Mapping[str, dict[str, Any]], servers: Servers
) -> tuple[str, Searcher]:
    """The back end of that name, or the one that the index is for, and its name. kept: the settings
    of those that the index has. Raises UserError."""
    name = name or (next(iter(kept)) if len(kept) == 1 else HYBRID)
    if name == HYBRID and len(kept) > 1:
        return name, HybridSearcher([_open(part, state, kept[part], servers) for part in kept])
    if name not in kept:
        known = ", ".join(kept)
        more = "at least two" if name == HYBRID else "it"
        raise UserError(f"--backend {name}: the index has {known}: ingest with {more}, too")
    return name, _open(name, state, kept[name], servers)


def _open(name: str, state: Path, settings: dict[str, Any], servers: Servers) -> Searcher:
    folder = state / name
    match name:
        case "bm25":
            return Bm25Searcher(folder, settings)
        case "dense":
            return DenseSearcher(folder, settings, servers.embeddings_url, servers.embeddings_model)
        case "late":
            return LateSearcher(
                folder, settings, servers.late_url, servers.late_model, servers.late_key
            )
    raise UserError(f"the index has a back end {name!r}, which this version does not know")
