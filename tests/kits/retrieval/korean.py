"""Korean words by morphemes; their model takes seconds to load."""

from __future__ import annotations

from functools import cache

from services.retriever.backends.bm25 import Words


@cache
def morphemes() -> Words:
    """Return the words that all tests of this process share."""
    return Words("morphemes")
