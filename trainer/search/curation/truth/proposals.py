"""Which pages may carry the same fact: by their text layers, and by embeddings of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.numeric.thresholds import below
from scorekit.numeric.vectors import cosine
from scorekit.retrieval.client import Retriever
from trainer.search.curation.samples import carriers
from trainer.search.curation.truth.answers import parts_of
from trainer.search.curation.truth.config import AlternativesConfig
from trainer.search.records import Question

#: Vectors of texts, or None for a text that has none.
Embed = Callable[[Sequence[str]], Sequence[Sequence[float] | None]]
_AT_ONCE = 8  # pages
_QUERY = 1000  # characters of a gold page that are searched for


@dataclass(frozen=True, slots=True)
class Proposal:
    """A page that may carry a question's fact. cosine: None without embeddings. by: overlap,
    embedding, or both."""

    page_id: str
    overlap: float
    cosine: float | None
    by: tuple[str, ...]


class PageTexts:
    """The text layers of an index, each asked for once."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._texts: dict[str, str] = {}

    def fetch(self, pages: Sequence[str]) -> None:
        """Have those of all these pages. Raises UserError where the index lacks one."""
        wanted = [page for page in dict.fromkeys(pages) if page not in self._texts]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._texts.update(zip(wanted, pool.map(self._read, wanted), strict=True))

    def _read(self, page_id: str) -> str:
        try:
            page = self._retriever.page(page_id)
        except RequestError as error:
            if error.type != "not_found":
                raise
            raise UserError(
                f"the index has no page {page_id!r}: ingest its file, or mend the row"
            ) from None
        return "\n".join(box.text for box in page.boxes)

    def __getitem__(self, page_id: str) -> str:
        return self._texts[page_id]

    def all(self) -> Mapping[str, str]:
        """Page id -> text, of those that were fetched."""
        return self._texts


def propose(
    questions: Sequence[Question],
    retriever: Retriever,
    cfg: AlternativesConfig,
    embed: Embed | None = None,
) -> dict[str, list[Proposal]]:
    """Question id -> pages that may carry its fact beside those that are known to, best first.

    The pool of a question: hits of its text, of that with the reference, and of the text of each
    gold page. Questions without gold page or reference have no entry.
    """
    able = [one for one in questions if one.gold and one.reference_answer]
    texts = PageTexts(retriever)
    texts.fetch([page for one in able for page in one.gold])
    pools = _pools(able, retriever, texts, cfg)
    texts.fetch([page for pool in pools.values() for page in pool])
    words = {page: frozenset(parts_of(text)) for page, text in texts.all().items()}
    weights = _weights(words)
    near = _cosines(able, pools, texts, cfg, embed)
    found = {}
    for one in able:
        known = frozenset(parts_of(one.reference_answer)), *(words[page] for page in one.gold)
        overlaps = {
            page: overlap(*known, page=words[page], weights=weights) for page in pools[one.id]
        }
        found[one.id] = _proposals(overlaps, near.get(one.id, {}), cfg)
    return found


def overlap(
    reference: frozenset[str],
    *gold: frozenset[str],
    page: frozenset[str],
    weights: Mapping[str, float],
) -> float:
    """How much of the reference's words and numbers a page has, and how much of a gold page's (of
    several the one that it has most of): the mean of the two shares, each word by its weight."""
    return (_share(reference, page, weights) + max(_share(of, page, weights) for of in gold)) / 2


def _share(words: frozenset[str], page: frozenset[str], weights: Mapping[str, float]) -> float:
    whole = math.fsum(weights.get(word, 0.0) for word in words)
    return math.fsum(weights[word] for word in words & page) / whole if whole else 0.0


def _asked(question: Question) -> str:
    return f"{question.question} {question.reference_answer}"


def _weights(pages: Mapping[str, frozenset[str]]) -> dict[str, float]:
    """Inverse document frequency: log(pages / pages with the word)."""
    counts = Counter(word for words in pages.values() for word in words)
    return {word: math.log(len(pages) / count) for word, count in counts.items()}


def _pools(
    questions: Sequence[Question], retriever: Retriever, texts: PageTexts, cfg: AlternativesConfig
) -> dict[str, list[str]]:
    queries = [
        (one, query)
        for one in questions
        for query in (one.question, _asked(one), *(texts[page][:_QUERY] for page in one.gold))
        if query.strip()
    ]
    answers = retriever.search([query for _, query in queries], cfg.pool)
    pools: dict[str, dict[str, None]] = {one.id: {} for one in questions}
    for (one, query), hits in zip(queries, answers, strict=True):
        if isinstance(hits, SampleError):
            raise UserError(f"{one.id}: the search for {query[:60]!r} failed: {hits}")
        known = carriers(one)
        pools[one.id].update({hit.page_id: None for hit in hits if hit.page_id not in known})
    return {name: sorted(pool) for name, pool in pools.items()}


def _cosines(
    questions: Sequence[Question],
    pools: Mapping[str, Sequence[str]],
    texts: PageTexts,
    cfg: AlternativesConfig,
    embed: Embed | None,
) -> dict[str, dict[str, float]]:
    """Question id -> page id -> cosine of question and reference with the page's text."""
    if embed is None:
        return {}
    pages = [
        page
        for page in dict.fromkeys(page for pool in pools.values() for page in pool)
        if texts[page].strip()
    ]
    vectors = embed(
        [_asked(one) for one in questions] + [texts[p][: cfg.embeddings_chars] for p in pages]
    )
    asked = dict(zip([one.id for one in questions], vectors, strict=False))
    of_page = dict(zip(pages, vectors[len(questions) :], strict=True))
    return {
        name: {
            page: cosine(mine, theirs)
            for page in pools[name]
            if (theirs := of_page.get(page)) is not None
        }
        for name, mine in asked.items()
        if mine is not None
    }


def _proposals(
    overlaps: Mapping[str, float], cosines: Mapping[str, float], cfg: AlternativesConfig
) -> list[Proposal]:
    by_text = _best(overlaps, cfg.least_overlap, cfg.most)
    by_vector = _best(cosines, cfg.least_cosine, cfg.most)
    return [
        Proposal(
            page,
            overlaps[page],
            cosines.get(page),
            tuple(
                name for name, of in (("overlap", by_text), ("embedding", by_vector)) if page in of
            ),
        )
        for page in dict.fromkeys([*by_text, *by_vector])
    ]


def _best(values: Mapping[str, float], least: float, most: int) -> list[str]:
    """The greatest; of equals the first by name."""
    there = sorted(
        (page for page in values if not below(values[page], least)), key=lambda p: (-values[p], p)
    )
    return there[:most]
