"""How early an episode was shown its gold pages."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Literal

from trainer.search.records import Question

#: What counts as a gold: a gold page itself; any page of its document; it, or a page that is known
#: to carry the same fact (`Question.alternatives`).
GoldUnit = Literal["page", "document", "alternatives"]


def ndcg(shown: Sequence[str], question: Question, gold: GoldUnit = "page") -> float | None:
    """Normalised discounted cumulative gain of pages in the order in which they were shown; None
    for a question that names no gold page: there is nothing to find, which is not to find nothing.

    Gain is binary, the discount log2(rank + 1) (Burges et al., 2005), without a cut-off. The rank
    is that among the pages shown, not that of the search engine; a page shown again counts where it
    first stood. The ideal shows a gold at each rank until all are shown.

    A gold counts once, and a page for one gold, so that the value stays within 1 also where several
    pages do for a gold, or one for several golds: of all ways to pair them, the best.
    """
    pages = list(dict.fromkeys(shown))
    if gold == "document":
        found = [_document(page) for page in pages]
        golds = [{document} for document in dict.fromkeys(map(_document, question.gold))]
    else:
        others = question.alternatives if gold == "alternatives" else {}
        found = pages
        golds = [{page, *others.get(page, ())} for page in dict.fromkeys(question.gold)]
    if not golds:
        return None
    paired: dict[int, str] = {}
    # To take by rank whatever can still be paired gives the greatest sum: what can be paired at
    # all is a matroid.
    gain = sum(
        _discount(rank) for rank, page in enumerate(found, 1) if _pair(page, golds, paired, set())
    )
    return gain / sum(_discount(rank) for rank in range(1, len(golds) + 1))


def _pair(page: str, golds: Sequence[set[str]], paired: dict[int, str], tried: set[int]) -> bool:
    """Pair a page with a gold, moving the pages that have one to others where need be; False, and
    nothing has changed, where that cannot be done (Kuhn's augmenting path)."""
    for place, pages in enumerate(golds):
        if page in pages and place not in tried:
            tried.add(place)
            if place not in paired or _pair(paired[place], golds, paired, tried):
                paired[place] = page
                return True
    return False


def _discount(rank: int) -> float:
    return 1 / log2(rank + 1)


def _document(page_id: str) -> str:
    """By the rule of page ids: the file's stem, `_`, the page's number."""
    return page_id.rpartition("_")[0]
