"""The retriever's backend: one thread reads queries, others search the index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scorekit import __version__
from scorekit.errors import SampleError
from scorekit.retrieval.wire import IndexInfo
from scorekit.server.backend import Encoded, Outcome, installed_versions
from services.retriever.backends.opening import Searcher, Servers, open_searcher
from services.retriever.backends.ranking import best
from services.retriever.endpoint import (
    IndexRef,
    Query,
    RetrieverDescription,
    SearchEndpoint,
    SearchOptions,
    SearchR1Endpoint,
    VragEndpoint,
    hit_of,
)
from services.retriever.index.records import PageRecord
from services.retriever.index.store import Index
from services.retriever.routes import PageRoutes


class _EncodedQuery(NamedTuple):
    query: Any
    top_k: int
    without: list[int]


class RetrieverBackend:
    """An index, searched by one backend or by several.

    backend: its name; None: the index's only one, or `hybrid` if it has several.
    servers: addresses of the models that embed queries.
    """

    service = "retriever"

    def __init__(
        self,
        index: Path,
        backend: str | None = None,
        servers: Servers | None = None,
        *,
        max_query_chars: int = 4000,
    ) -> None:
        self._index = Index(index)
        self._backend = backend
        self._servers = servers or Servers()
        # Waiting for a server takes no CPU, so several batches can wait at once.
        self.workers = 4 if self._servers != Servers() else 1
        self._max_query_chars = max_query_chars
        self._pages: list[PageRecord] = []
        self._searcher: Searcher
        self._routes = PageRoutes(self._index.paths)
        compat_endpoints = (SearchR1Endpoint(self._text_of), VragEndpoint())
        self.endpoint = SearchEndpoint(self._routes.add, compat_endpoints)

    def check(self) -> None:
        """Raise UserError if there is no index."""
        self._index.open()

    def load(self) -> RetrieverDescription:
        """Read the index into memory. Raises UserError."""
        manifest, self._pages, folder = self._index.open()
        name, self._searcher = open_searcher(
            self._backend, folder, manifest.backends, self._servers
        )
        self._searcher.check()
        self.endpoint.pages = [hit_of(page) for page in self._pages]
        self._numbers = {page.page_id: k for k, page in enumerate(self._pages)}
        used_settings = {
            part: settings
            for part, settings in manifest.backends.items()
            if name in (part, "hybrid")
        }
        engine = json.dumps([manifest.revision, name, used_settings], sort_keys=True)
        revision = hashlib.blake2b(engine.encode(), digest_size=16).hexdigest()
        self._routes.open(self._pages, revision)
        info = IndexInfo(
            id=manifest.id,
            revision=revision,
            pages=manifest.pages,
            documents=manifest.documents,
            backend=name,
        )
        self.endpoint.index = IndexRef(id=info.id, revision=info.revision, pages=info.pages)
        return RetrieverDescription(
            model=manifest.id,
            revision=revision,
            tokenizer="none",
            dtype="float32",
            device="cpu",
            max_input_length=self._max_query_chars,
            versions={"scorekit": __version__, **installed_versions("bm25s", "kiwipiepy")},
            index=info,
            textless=len(manifest.textless),
            skipped=len(manifest.skipped),
            settings=used_settings,
            max_query_chars=self._max_query_chars,
            numbers=self._numbers,
        )

    def encode(
        self, samples: Sequence[Query], options: SearchOptions
    ) -> list[Encoded | SampleError]:
        """Return what the backend reads from each query. A batch is counted in queries."""
        return [
            Encoded(
                1,
                {},
                _EncodedQuery(
                    self._searcher.read(sample.query),
                    options.top_k,
                    [self._numbers[p] for p in set(sample.exclude) if p in self._numbers],
                ),
            )
            for sample in samples
        ]

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return a ranking for each query."""
        encoded_queries: list[_EncodedQuery] = [encoded.payload for encoded in batch]
        outcomes = self._searcher.scores(
            [encoded.query for encoded in encoded_queries],
            [encoded.top_k + len(encoded.without) for encoded in encoded_queries],
        )
        return [
            scores
            if isinstance(scores, SampleError)
            else {"ranking": best(scores, encoded.top_k, encoded.without)}
            for encoded, scores in zip(encoded_queries, outcomes, strict=True)
        ]

    def _text_of(self, page_id: str) -> str:
        return self._pages[self._numbers[page_id]].text

    def probe(self, words: int) -> Query:
        """Return a query; `words` is ignored."""
        return Query(query="page")

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return None: the retriever uses no device."""
        return None
