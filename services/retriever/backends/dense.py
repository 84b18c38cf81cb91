"""Dense retrieval: one vector a query, one for each piece of a page's text, from any server of
OpenAI's `POST /v1/embeddings`. A page's score is the cosine of its best piece."""

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
    SERVER_DEADLINE_S,
    KeptVectors,
    PackedVectors,
    Vectors,
    check_same_model,
    checked_vectors,
    of_length_one,
    pack,
)
from services.retriever.index.reading import Places
from services.retriever.index.records import PageRecord, Step, no_step

log = structlog.get_logger()

NAME = "dense"
#: The text whose vector tells whether it is the same model.
PROBE = "Revenue by quarter. 분기별 매출."
#: Pages whose vectors are asked for, and kept, at once.
_TOGETHER = 64


class DenseBuilder:
    """Makes its index. query_prefix, page_prefix: what the model wants before a text, such as
    "query: "."""

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
        """Raises ServiceUnreachable, RequestError or UserError where no such server answers."""
        self._told = self._client.info()

    def build(
        self, pages: Sequence[PageRecord], folder: Path, places: Places, step: Step = no_step
    ) -> dict[str, Any]:
        """Pages whose text the model refuses, or that have none, are no hits: their ids."""
        told = self._told
        kept = KeptVectors(places.vectors, (NAME, told.model, told.revision, self._page_prefix))
        vectors: list[Vectors] = []
        for start in range(0, len(pages), _TOGETHER):
            part = pages[start : start + _TOGETHER]
            vectors += self._of(part, kept)
            step(len(part))
        dimension = pack(vectors, folder)
        (probe,) = self._client.embed([self._query_prefix + PROBE])
        if isinstance(probe, SampleError):
            raise UserError(f"the embedding server does not take a plain text: {probe}")
        np.save(folder / "probe.npy", of_length_one(checked_vectors([probe])), allow_pickle=False)
        return {
            "model": told.model,
            "model_revision": told.revision,
            "dimension": dimension,
            "query_prefix": self._query_prefix,
            "page_prefix": self._page_prefix,
            "without": [p.page_id for p, v in zip(pages, vectors, strict=True) if not len(v)],
        }

    def _of(self, pages: Sequence[PageRecord], kept: KeptVectors) -> list[Vectors]:
        """[n, D] of each page, [0, 1] of one without."""
        found = {page.text: kept.get(_digest(page.text)) for page in pages}
        wanted = [text for text, vectors in found.items() if vectors is None and text]
        for text, vectors in zip(wanted, self._embed(wanted), strict=True):
            found[text] = vectors
            kept.put(_digest(text), vectors)
        none = np.zeros((0, 1), np.float32)
        return [none if (one := found[page.text]) is None else one for page in pages]

    def _embed(self, texts: Sequence[str]) -> list[Vectors]:
        """Of each text: the vectors of as few pieces as the server takes."""
        outcomes = self._client.embed([self._page_prefix + text for text in texts])
        return [
            self._of_halves(text)
            if isinstance(one, SampleError)
            else of_length_one(checked_vectors([one]))
            for text, one in zip(texts, outcomes, strict=True)
        ]

    def _of_halves(self, text: str) -> Vectors:
        """Of a text that is refused, most likely as too long: in two, by lines where it has some.
        What is refused to the last word has no vector."""
        parts = text.split("\n")
        glue = "\n"
        if len(parts) == 1:
            parts, glue = text.split(), " "
        if len(parts) == 1:
            return np.zeros((0, 1), np.float32)
        half = len(parts) // 2
        both = self._embed([glue.join(parts[:half]), glue.join(parts[half:])])
        some = [one for one in both if len(one)]
        return np.concatenate(some) if some else both[0]


class DenseSearcher:
    """Searches what `DenseBuilder` has made.

    url: of a server of the same model; None: raises UserError, for without one no query has a
    vector.
    """

    name = NAME

    def __init__(
        self, folder: Path, settings: dict[str, Any], url: str | None, model: str | None
    ) -> None:
        if url is None:
            made = settings["model"]
            raise UserError(f"--embeddings-url: the index is {made}'s: name a server of it")
        self._folder, self._prefix = folder, settings["query_prefix"]
        self._vectors = PackedVectors(folder)
        self._client = Embeddings(url, model=model, timeout_s=20.0, deadline_s=SERVER_DEADLINE_S)

    def check(self) -> None:
        """Raises UserError where another model answers than has made the index."""
        try:
            self._client.info()
            (probe,) = self._client.embed([self._prefix + PROBE])
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"--embeddings-url: {error}") from None
        if isinstance(probe, SampleError):
            raise UserError(f"--embeddings-url: it does not take a plain text: {probe}")
        found = of_length_one(checked_vectors([probe]))
        check_same_model(self._folder / "probe.npy", found, "--embeddings-url")

    def read(self, query: str) -> Any:
        """What the server is to embed."""
        return self._prefix + query

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """The cosine of each query and each page's best piece; a query fails with its vector."""
        try:
            embedded = self._client.embed(queries)
        except (ServiceUnreachable, RequestError) as error:
            log.warning("embedding_server_failed", kind=type(error).__name__)
            fault = SampleError("upstream", "the embedding server gives no vectors")
            return [fault] * len(queries)
        return _scores(self._vectors, embedded)


def _scores(
    pages: PackedVectors, embedded: Sequence[list[float] | SampleError]
) -> list[Scores | SampleError]:
    good = [
        of_length_one(checked_vectors([one], pages.dimension))
        for one in embedded
        if not isinstance(one, SampleError)
    ]
    found = iter(pages.max_sim(good) if good else [])
    return [one if isinstance(one, SampleError) else next(found) for one in embedded]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
