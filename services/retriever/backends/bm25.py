"""BM25 over the words of pages (bm25s)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import installed_versions
from services.retriever.backends.ranking import Scores
from services.retriever.backends.words import Korean, Words
from services.retriever.index.reading import Places
from services.retriever.index.records import PageRecord, Step, no_step

NAME = "bm25"
#: A text with something of all that is read in a way of its own.
PROBE = (
    "Exports of STEEL fell 1,234.5 % in 2017: CO2, café. "
    "서울의 인구가 줄었다, 물 값 3만 원. 東京カナ"
)


class Bm25Builder:
    """Makes its index. korean: how Korean words are found. k1, b: BM25's own."""

    name = NAME

    def __init__(self, korean: Korean = "morphemes", k1: float = 1.5, b: float = 0.75) -> None:
        self._korean: Korean = korean
        self._k1, self._b = k1, b

    def check(self) -> None:
        """Nothing can be wrong."""

    def build(
        self, pages: Sequence[PageRecord], folder: Path, places: Places, step: Step = no_step
    ) -> dict[str, Any]:
        """Raises UserError where no page has a word."""
        import bm25s

        words = Words(self._korean)
        texts = []
        for page in pages:
            texts.append(words.of(page.text))
            step(1)
        # In their order, so that the same pages give the same files.
        ids = {word: k for k, word in enumerate(sorted({w for text in texts for w in text}))}
        if not ids:
            raise UserError(
                "no page has any text for bm25: read it from the pictures (--ocr), or search by "
                "vectors of the pictures (--backend late)"
            )
        model = bm25s.BM25(k1=self._k1, b=self._b, method="lucene")
        tokenised = bm25s.tokenization.Tokenized([[ids[w] for w in text] for text in texts], ids)
        model.index(tokenised, show_progress=False)
        model.save(folder, show_progress=False)
        return {"korean": self._korean, "k1": self._k1, "b": self._b} | _made_with(words)


class Bm25Searcher:
    """Searches what `Bm25Builder` has made. Raises UserError where other versions, of the libraries
    or of our own rules, would find other words than the index has."""

    name = NAME

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import bm25s

        self._words = Words(settings["korean"])
        here = _made_with(self._words)
        if others := [name for name in here if settings.get(name) != here[name]]:
            raise UserError(
                f"the index was made with another version of {', '.join(others)}: ingest it again"
            )
        self._model = bm25s.BM25.load(folder, show_progress=False)

    def check(self) -> None:
        """Nothing is asked of others."""

    def read(self, query: str) -> Any:
        """Ids of the query's words that the index has."""
        return self._model.get_tokens_ids(self._words.of(query))

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """Of each query; a page that has none of its words is no hit."""
        return [self._scores(ids) for ids in queries]

    def _scores(self, ids: list[int]) -> Scores:
        found: Scores = self._model.get_scores_from_ids(ids)
        np.putmask(found, found <= 0.0, -np.inf)
        return found


def _made_with(words: Words) -> dict[str, str | None]:
    """What the words of a text depend on. words: a digest of those of a plain text."""
    libraries = ["bm25s", *(["kiwipiepy"] if words.korean == "morphemes" else [])]
    found = "\0".join(words.of(PROBE)).encode()
    return installed_versions(*libraries) | {"words": hashlib.sha256(found).hexdigest()[:16]}
