"""Compute NDCG: how early an episode saw its gold pages."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Literal

from trainer.search.records import Question

#: Pages that count as a hit: the gold page; any page of its document; the gold page or a page with
#: the same fact (`Question.alternatives`).
GoldUnit = Literal["page", "document", "alternatives"]


def ndcg(
    pages_in_order: Sequence[str], question: Question, gold: GoldUnit = "page"
) -> float | None:
    """Return the normalized discounted cumulative gain of visible pages in their order.

    None for a question without a gold page. Gain is binary, the discount log2(rank + 1) (Burges et
    al., 2005), without a cut-off. The rank is that among the visible pages, not that of the search
    engine; a repeated page counts at its first rank. The ideal has a gold page at each rank.

    A gold page counts once, and a page counts for one gold page, so the value is at most 1 even if
    several pages match a gold page or one page matches several. The best pairing counts.
    """
    pages = list(dict.fromkeys(pages_in_order))
    if gold == "document":
        keys = [_document(page) for page in pages]
        golds = [{document} for document in dict.fromkeys(map(_document, question.gold))]
    else:
        alternatives = question.alternatives if gold == "alternatives" else {}
        keys = pages
        golds = [{page, *alternatives.get(page, ())} for page in dict.fromkeys(question.gold)]
    if not golds:
        return None
    paired: dict[int, str] = {}
    # Pairing greedily by rank gives the greatest sum: the sets of pages that can be paired are
    # a matroid.
    gain = sum(
        _discount(rank) for rank, page in enumerate(keys, 1) if _pair(page, golds, paired, set())
    )
    return gain / sum(_discount(rank) for rank in range(1, len(golds) + 1))


def _pair(page: str, golds: Sequence[set[str]], paired: dict[int, str], tried: set[int]) -> bool:
    """Pair a page with a gold page and return whether that is possible.

    Pages that are paired already may move to other gold pages (Kuhn's augmenting path).
    """
    for index, pages in enumerate(golds):
        if page in pages and index not in tried:
            tried.add(index)
            if index not in paired or _pair(paired[index], golds, paired, tried):
                paired[index] = page
                return True
    return False


def _discount(rank: int) -> float:
    return 1 / log2(rank + 1)


def _document(page_id: str) -> str:
    """Return the document of a page id, which is the file's stem, `_`, the page number."""
    return page_id.rpartition("_")[0]
