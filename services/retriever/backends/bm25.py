"""BM25 over the words of pages (bm25s)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scorekit.errors import SampleError, UserError
from scorekit.server.backend import installed_versions
from services.retriever.backends.lines import continued_lines
from services.retriever.backends.ranking import Scores
from services.retriever.backends.words import Korean, Words
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord, Step, no_step

NAME = "bm25"
#: A text with every kind of character that has its own rule.
PROBE = (
    "Exports of STEEL fell 1,234.5 % in 2017: CO2, café. "
    "서울의 인구가 줄었다, 물 값 3만 원. 東京カナ, Wert\u00adpapier"
)
#: Lines with each kind of division.
DIVIDED_PROBE = (
    ("a well-", "known, recommen-", "dation"),
    ("Donau-", "dampf-", "schiff"),
    ("in 2020-", "2021"),
    ("温", "差"),
    ("대한", "민국은"),
    ("Wert\u00ad", "papier"),
)


class Bm25Builder:
    """Builds the BM25 index. korean: method for Korean words. k1, b: BM25's parameters."""

    name = NAME

    def __init__(self, korean: Korean = "morphemes", k1: float = 1.5, b: float = 0.75) -> None:
        self._korean: Korean = korean
        self._k1, self._b = k1, b

    def check(self) -> None:
        """Do nothing: these settings are always valid."""

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the index; return its settings. Raises UserError if no page has a word."""
        bm25s = _import_bm25s()
        words = Words(self._korean)
        texts = []
        for text in page_words(pages, words):
            texts.append(text)
            step(1)
        # Sorted, so that the same pages give the same files.
        ids = {word: k for k, word in enumerate(sorted({w for text in texts for w in text}))}
        if not ids:
            raise UserError(
                "no page has any text for bm25. Read text from the images (--ocr), or search by "
                "vectors of the images (--backend late)"
            )
        model = bm25s.BM25(k1=self._k1, b=self._b, method="lucene")
        tokenized = bm25s.tokenization.Tokenized([[ids[w] for w in text] for text in texts], ids)
        model.index(tokenized, show_progress=False)
        model.save(folder, show_progress=False)
        return {"korean": self._korean, "k1": self._k1, "b": self._b} | _word_versions(words)


def page_words(pages: Sequence[PageRecord], words: Words) -> Iterator[list[str]]:
    """Yield the words of each page; after them those that are divided between its lines."""
    for page, lines in zip(pages, continued_lines(pages), strict=True):
        full_words = words.of_page(page.text)
        yield full_words + words.of_divided(lines, full_words)


class Bm25Searcher:
    """Searches the index of `Bm25Builder`.

    Raises UserError if other versions of the libraries or rules would find other words."""

    name = NAME

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        bm25s = _import_bm25s()
        self._words = Words(settings["korean"])
        current = _word_versions(self._words)
        if changed := [name for name in current if settings.get(name) != current[name]]:
            raise UserError(
                f"the index was made with another version of {', '.join(changed)}: ingest it again"
            )
        self._model = bm25s.BM25.load(folder, show_progress=False)

    def check(self) -> None:
        """Do nothing: no server is needed."""

    def read(self, query: str) -> Any:
        """Return the ids of the query's words that are in the index."""
        return self._model.get_tokens_ids(self._words.of_query(query))

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the scores of each query; -inf for a page with none of its words."""
        return [self._scores(ids) for ids in queries]

    def _scores(self, ids: list[int]) -> Scores:
        scores: Scores = self._model.get_scores_from_ids(ids)
        np.putmask(scores, scores <= 0.0, -np.inf)
        return scores


def _import_bm25s() -> Any:
    """Return the library. Where jax is installed, it calls jax at its import, and jax takes three
    quarters of a GPU's memory at its first call: so jax is kept on the CPU.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import bm25s

    return bm25s


def _word_versions(words: Words) -> dict[str, str | None]:
    """Return the versions that the words of a text depend on.

    words: a digest of the probe's words."""
    libraries = ["bm25s", *(["kiwipiepy"] if words.korean == "morphemes" else [])]
    words_of_probe = [*words.of_page(PROBE), "", *words.of_query(PROBE)]
    probe_words = "\0".join([*words_of_probe, "", *words.of_divided(DIVIDED_PROBE)]).encode()
    return installed_versions(*libraries) | {"words": hashlib.sha256(probe_words).hexdigest()[:16]}
