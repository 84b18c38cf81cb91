"""A retriever without a library: a page's score is the number of the query's words that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scorekit.errors import SampleError
from scorekit.retrieval.wire import TextBox
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.backends.ranking import Scores
from services.retriever.endpoint import IndexRef, RetrieverDescription
from services.retriever.index.images import png_of, sha256
from services.retriever.index.records import PageRecord
from services.retriever.model import RetrieverBackend
from testing.retriever_index import write_index

#: The same for every retriever of this kind.
TEXTS = {"trade_1": "exports of steel", "trade_2": "imports of rice", "인구_1": "서울의 인구"}
REVISION = "0" * 32


class FakeRetriever(RetrieverBackend):
    """Three pages, in a folder of their own."""

    def __init__(self) -> None:
        from PIL import Image

        self._home = TemporaryDirectory(prefix="retriever")
        folder = Path(self._home.name) / "fake"
        super().__init__(folder)
        png = png_of(Image.new("RGB", (64, 36), "white"))
        path = self._index.paths.image_path(sha256(png))
        path.parent.mkdir(parents=True)
        path.write_bytes(png)
        pages = [_page(page_id, text, sha256(png)) for page_id, text in TEXTS.items()]
        write_index(folder, pages, [Bm25Builder("bigrams")])

    def load(self) -> RetrieverDescription:
        """Load the index; its answers do not depend on a library's version."""
        loaded = super().load()
        self._searcher = _WordCounts([page.text for page in self._pages])
        index = loaded.index.model_copy(update={"revision": REVISION})
        self.endpoint.index = IndexRef(id=index.id, revision=REVISION, pages=index.pages)
        self._routes.open(self._pages, REVISION)
        settings = {"bm25": {"korean": "bigrams"}}
        return replace(loaded, index=index, revision=REVISION, settings=settings)


class _WordCounts:
    name = "bm25"

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.split() for text in texts]

    def check(self) -> None:
        """Do nothing: no other service is needed."""

    def read(self, query: str) -> Any:
        """Return the words of the query."""
        return query.lower().split()

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the scores of each query."""
        counts = [[sum(w in text for w in query) for text in self._texts] for query in queries]
        return [np.array([n or -np.inf for n in row], dtype=np.float32) for row in counts]


def _page(page_id: str, text: str, image: str) -> PageRecord:
    document, _, page = page_id.rpartition("_")
    box = TextBox(text=text, x1=4, y1=4, x2=60, y2=16, letter_height=10)
    return PageRecord(
        page_id=page_id,
        document=document,
        page=int(page),
        width=64,
        height=36,
        picture=image,
        boxes=[box],
    )
