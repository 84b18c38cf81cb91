"""Dense retrieval with any server of OpenAI's `POST /v1/embeddings`.

A query has one vector, a page one for each chunk of its text. A page's score is the cosine of its
best chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from scorekit.client.embeddings import Embeddings
from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from services.retriever.backends.ranking import Scores
from services.retriever.backends.vectors import (
    PackedVectors,
    VectorCache,
    Vectors,
    check_same_model,
    checked_vectors,
    of_length_one,
    pack,
)
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord, Step, no_step
from services.retriever.settings import SERVER_DEADLINE_S

log = structlog.get_logger()

NAME = "dense"
#: The text whose vector identifies the model.
PROBE = "Revenue by quarter. 분기별 매출."
#: Number of pages that are embedded and cached at once.
_BATCH_PAGES = 64


class DenseBuilder:
    """Builds the dense index.

    query_prefix, page_prefix: text that the model expects first.
    """

    name = NAME

    def __init__(
        self,
        url: str,
        model: str | None = None,
        query_prefix: str = "",
        page_prefix: str = "",
    ) -> None:
        self._client = Embeddings(url, model=model)
        self._query_prefix, self._page_prefix = query_prefix, page_prefix

    def check(self) -> None:
        """Raise ServiceUnreachable, RequestError or UserError if the server does not answer."""
        self._info = self._client.info()

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the index; return its settings.

        without: ids of pages without a vector, whose text is empty or refused by the model."""
        info = self._info
        cache = VectorCache(paths.vectors, (NAME, info.model, info.revision, self._page_prefix))
        vectors: list[Vectors] = []
        for start in range(0, len(pages), _BATCH_PAGES):
            part = pages[start : start + _BATCH_PAGES]
            vectors += self._page_vectors(part, cache)
            step(len(part))
        dimension = pack(vectors, folder)
        (probe,) = self._client.embed([self._query_prefix + PROBE])
        if isinstance(probe, SampleError):
            raise UserError(f"the embedding server refuses a plain text: {probe}")
        np.save(folder / "probe.npy", of_length_one(checked_vectors([probe])), allow_pickle=False)
        return {
            "model": info.model,
            "model_revision": info.revision,
            "dimension": dimension,
            "query_prefix": self._query_prefix,
            "page_prefix": self._page_prefix,
            "without": [p.page_id for p, v in zip(pages, vectors, strict=True) if not len(v)],
        }

    def _page_vectors(self, pages: Sequence[PageRecord], cache: VectorCache) -> list[Vectors]:
        """Return the vectors of each page, [n, D]; [0, 1] for a page without any."""
        vectors_by_text = {page.text: cache.get(_digest(page.text)) for page in pages}
        missing = [text for text, vectors in vectors_by_text.items() if vectors is None and text]
        for text, vectors in zip(missing, self._embed(missing), strict=True):
            vectors_by_text[text] = vectors
            cache.put(_digest(text), vectors)
        empty = np.zeros((0, 1), np.float32)
        return [
            empty if (page_vectors := vectors_by_text[page.text]) is None else page_vectors
            for page in pages
        ]

    def _embed(self, texts: Sequence[str]) -> list[Vectors]:
        """Return the vectors of each text, with as few chunks as the server accepts."""
        outcomes = self._client.embed([self._page_prefix + text for text in texts])
        return [
            self._embed_halves(text)
            if isinstance(outcome, SampleError)
            else of_length_one(checked_vectors([outcome]))
            for text, outcome in zip(texts, outcomes, strict=True)
        ]

    def _embed_halves(self, text: str) -> Vectors:
        """Return the vectors of a refused text, most likely too long, after cutting it in two.

        It is cut between lines, else between words. A refused single word has no vector."""
        parts = text.split("\n")
        glue = "\n"
        if len(parts) == 1:
            parts, glue = text.split(), " "
        if len(parts) == 1:
            return np.zeros((0, 1), np.float32)
        half = len(parts) // 2
        both = self._embed([glue.join(parts[:half]), glue.join(parts[half:])])
        nonempty = [half_vectors for half_vectors in both if len(half_vectors)]
        return np.concatenate(nonempty) if nonempty else both[0]


class DenseSearcher:
    """Searches the index of `DenseBuilder`.

    url: a server of the same model. Raises UserError for None: queries need vectors.
    """

    name = NAME

    def __init__(
        self, folder: Path, settings: dict[str, Any], url: str | None, model: str | None
    ) -> None:
        if url is None:
            index_model = settings["model"]
            raise UserError(
                f"--embeddings-url: the index uses {index_model}. Name a server of this model"
            )
        self._folder, self._prefix = folder, settings["query_prefix"]
        self._vectors = PackedVectors(folder)
        self._client = Embeddings(url, model=model, timeout_s=20.0, deadline_s=SERVER_DEADLINE_S)

    def check(self) -> None:
        """Raise UserError if the server's model is not the one that built the index."""
        try:
            self._client.info()
            (probe,) = self._client.embed([self._prefix + PROBE])
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"--embeddings-url: {error}") from None
        if isinstance(probe, SampleError):
            raise UserError(f"--embeddings-url: the server refuses a plain text: {probe}")
        vectors = of_length_one(checked_vectors([probe]))
        check_same_model(self._folder / "probe.npy", vectors, "--embeddings-url")

    def read(self, query: str) -> Any:
        """Return the text to embed."""
        return self._prefix + query

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the cosine of each query and each page's best chunk.

        A query without a vector fails."""
        try:
            embedded = self._client.embed(queries)
        except (ServiceUnreachable, RequestError) as error:
            log.warning("embedding_server_failed", kind=type(error).__name__)
            failure = SampleError("upstream", "the embedding server gives no vectors")
            return [failure] * len(queries)
        return _scores(self._vectors, embedded)


def _scores(
    pages: PackedVectors, embedded: Sequence[list[float] | SampleError]
) -> list[Scores | SampleError]:
    vectors = [
        of_length_one(checked_vectors([vector], pages.dimension))
        for vector in embedded
        if not isinstance(vector, SampleError)
    ]
    scores = iter(pages.max_sim(vectors) if vectors else [])
    return [vector if isinstance(vector, SampleError) else next(scores) for vector in embedded]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
