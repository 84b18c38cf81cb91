"""Propose pages that may have the same fact, by text overlap and by embeddings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scorekit.errors import RequestError, SampleError, UserError
from scorekit.numeric.thresholds import below
from scorekit.numeric.vectors import cosine
from scorekit.retrieval.client import Retriever
from trainer.search.curation.config_sections import AlternativesConfig
from trainer.search.curation.samples import carriers
from trainer.search.diagnosis.answers import parts_of
from trainer.search.records import Question

#: Vectors of texts, or None for a text that has none.
Embed = Callable[[Sequence[str]], Sequence[Sequence[float] | None]]
_AT_ONCE = 8  # pages
_QUERY = 1000  # characters of a gold page that are searched for


@dataclass(frozen=True, slots=True)
class Proposal:
    """A page that may have a question's fact. cosine: None without embeddings. by: overlap,
    embedding, or both."""

    page_id: str
    overlap: float
    cosine: float | None
    by: tuple[str, ...]


def _fetch(retriever: Retriever, pages: Iterable[str], texts: dict[str, str]) -> None:
    """Add the text layers of further pages. Raises UserError if the index does not have one."""

    def read(page_id: str) -> str:
        try:
            page = retriever.page(page_id)
        except RequestError as error:
            if error.type != "not_found":
                raise
            raise UserError(
                f"the index has no page {page_id!r}. Ingest its file, or correct the row."
            ) from None
        return "\n".join(box.text for box in page.boxes)

    missing = [page for page in dict.fromkeys(pages) if page not in texts]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        texts.update(zip(missing, pool.map(read, missing), strict=True))


def propose(
    questions: Sequence[Question],
    retriever: Retriever,
    cfg: AlternativesConfig,
    embed: Embed | None = None,
) -> dict[str, list[Proposal]]:
    """Return the proposed pages of each question by its id, best first, without known ones.

    The pool of a question has the hits of its text, of its text with the reference, and of the text
    of each gold page. Questions without gold page or reference have no entry.
    """
    usable = [question for question in questions if question.gold and question.reference_answer]
    texts: dict[str, str] = {}
    _fetch(retriever, (page for question in usable for page in question.gold), texts)
    pools = _pools(usable, retriever, texts, cfg)
    _fetch(retriever, (page for pool in pools.values() for page in pool), texts)
    words = {page: frozenset(parts_of(text)) for page, text in texts.items()}
    weights = _weights(words)
    cosines = _cosines(usable, pools, texts, cfg, embed)
    proposals = {}
    for question in usable:
        reference = frozenset(parts_of(question.reference_text))
        golds = [words[page] for page in question.gold]
        overlaps = {
            page: _overlap(reference, golds, words[page], weights) for page in pools[question.id]
        }
        proposals[question.id] = _proposals(overlaps, cosines.get(question.id, {}), cfg)
    return proposals


def _overlap(
    reference: frozenset[str],
    golds: Sequence[frozenset[str]],
    page: frozenset[str],
    weights: Mapping[str, float],
) -> float:
    """Return the weighted overlap of a page with the reference and a gold page, 0 to 1.

    It is the mean of two shares: of the reference's words, and of the words of the gold page with
    the greatest overlap.
    """
    of_golds = max(_share(words, page, weights) for words in golds)
    return (_share(reference, page, weights) + of_golds) / 2


def _share(words: frozenset[str], page: frozenset[str], weights: Mapping[str, float]) -> float:
    total = math.fsum(weights.get(word, 0.0) for word in words)
    return math.fsum(weights[word] for word in words & page) / total if total else 0.0


def _query_text(question: Question) -> str:
    return f"{question.question} {question.reference_answer}"


def _weights(pages: Mapping[str, frozenset[str]]) -> dict[str, float]:
    """Return the inverse document frequency of each word: log(pages / pages with the word)."""
    counts = Counter(word for words in pages.values() for word in words)
    return {word: math.log(len(pages) / count) for word, count in counts.items()}


def _pools(
    questions: Sequence[Question],
    retriever: Retriever,
    texts: Mapping[str, str],
    cfg: AlternativesConfig,
) -> dict[str, list[str]]:
    queries = [
        (question, query)
        for question in questions
        for query in (
            question.question,
            _query_text(question),
            *(texts[page][:_QUERY] for page in question.gold),
        )
        if query.strip()
    ]
    answers = retriever.search([query for _, query in queries], cfg.pool)
    pools: dict[str, dict[str, None]] = {question.id: {} for question in questions}
    for (question, query), hits in zip(queries, answers, strict=True):
        if isinstance(hits, SampleError):
            raise UserError(f"{question.id}: the search for {query[:60]!r} failed: {hits}")
        known_pages = carriers(question)
        pools[question.id].update(
            {hit.page_id: None for hit in hits if hit.page_id not in known_pages}
        )
    return {name: sorted(pool) for name, pool in pools.items()}


def _cosines(
    questions: Sequence[Question],
    pools: Mapping[str, Sequence[str]],
    texts: Mapping[str, str],
    cfg: AlternativesConfig,
    embed: Embed | None,
) -> dict[str, dict[str, float]]:
    """Return the cosine of question and reference with each page's text, by question and page."""
    if embed is None:
        return {}
    pages = [
        page
        for page in dict.fromkeys(page for pool in pools.values() for page in pool)
        if texts[page].strip()
    ]
    vectors = embed(
        [_query_text(question) for question in questions]
        + [texts[p][: cfg.embeddings_chars] for p in pages]
    )
    vector_by_question = dict(zip([question.id for question in questions], vectors, strict=False))
    vector_by_page = dict(zip(pages, vectors[len(questions) :], strict=True))
    return {
        name: {
            page: cosine(question_vector, page_vector)
            for page in pools[name]
            if (page_vector := vector_by_page.get(page)) is not None
        }
        for name, question_vector in vector_by_question.items()
        if question_vector is not None
    }


def _proposals(
    overlaps: Mapping[str, float], cosines: Mapping[str, float], cfg: AlternativesConfig
) -> list[Proposal]:
    best = {
        "overlap": _best(overlaps, cfg.least_overlap, cfg.most),
        "embedding": _best(cosines, cfg.least_cosine, cfg.most),
    }
    proposals = []
    for page in dict.fromkeys([*best["overlap"], *best["embedding"]]):
        by = tuple(name for name, pages in best.items() if page in pages)
        proposals.append(Proposal(page, overlaps[page], cosines.get(page), by))
    return proposals


def _best(values: Mapping[str, float], min_value: float, max_pages: int) -> list[str]:
    """Return the greatest values, of equal ones first by name."""
    candidates = sorted(
        (page for page in values if not below(values[page], min_value)),
        key=lambda p: (-values[p], p),
    )
    return candidates[:max_pages]
