"""The index of some of the search demo's PDFs."""

from __future__ import annotations

import shutil
from pathlib import Path

from demo.search.run import HERE
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest

DECKS = ("life-expectancy", "income-per-head", "국가_개요")


def make_demo_index(folder: Path) -> None:
    """Write `index` into a folder. It finds Korean words by pairs of letters, in no time."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for deck in DECKS:
        shutil.copy(HERE / f"corpus/{deck}.pdf", corpus)
    ingest([corpus], folder / "index", [Bm25Builder("bigrams")], workers=1)
