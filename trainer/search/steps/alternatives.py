"""The step `alternatives`: find other pages with the fact.

Pages are proposed by text overlap and by embeddings. The generator confirms a page if it answers
right with this page instead of the gold page.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field

from scorekit.client.embeddings import Embeddings
from scorekit.config import Config
from scorekit.errors import RequestError, SampleError, UserError
from scorekit.numeric import below, cosine
from scorekit.retrieval.client import Retriever
from trainer.config_base import may_change
from trainer.search.data import question_row
from trainer.search.images.views import page_within
from trainer.search.records import SUCCESS, Question
from trainer.search.steps.agreement import parts_of
from trainer.search.steps.asking import AnswerTrials, Asking, sum_usage, trial_usage
from trainer.search.steps.episodes import (
    CuratedPrompt,
    carriers,
    refs,
)
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work, WorkItem

Became = Literal[
    "grown",
    "no_gold",
    "none_proposed",
    "gold_fails",
    "known_without",
    "none_confirmed",
    "undecided",
]


#: The outcomes of a row, in the order of the rules.
BECAME: Final[Mapping[Became, str]] = {
    "no_gold": "the row names no gold page, or has no reference",
    "none_proposed": "no page is like enough to be asked about",
    "undecided": "a call failed, and no page was confirmed",
    "gold_fails": "the generator does not answer right from the gold pages: it confirms nothing",
    "known_without": "it answers right without a gold page, too: that confirms nothing",
    "none_confirmed": "from no proposed page it answers right",
    "grown": "at least one page was confirmed, and stands under `alternatives` now",
}


_ROWS = 200  # max rows of a table


LoadImage = Callable[[str], Awaitable[bytes]]

#: Vectors of texts, or None for a text that has none.
Embed = Callable[[Sequence[str]], Sequence[Sequence[float] | None]]


_AT_ONCE = 8  # pages


_QUERY = 1000  # characters of a gold page that are searched for


class AlternativesConfig(Config):
    """Pages that carry the same fact as a gold page: proposed, then confirmed by the generator."""

    pool: int = Field(
        100, ge=1, le=1000, description="Hits of each search from which pages are proposed."
    )
    most: int = Field(
        5, ge=1, description="Pages proposed for a question by text overlap; as many by embedding."
    )
    least_overlap: float = Field(
        0.1, ge=0, le=1, description="Text overlap of a page that is proposed, at least."
    )
    embeddings_url: str | None = may_change(
        None, description="An embedding server, with or without /v1; null: text overlap alone."
    )
    embeddings_model: str | None = Field(
        None, description="Its model; null: the only one that the server has."
    )
    embeddings_chars: int = Field(2000, ge=1, description="Of a page's text, so much is embedded.")
    least_cosine: float = Field(
        0.3, ge=-1, le=1, description="Cosine of a page that is proposed by embedding, at least."
    )
    times: int = Field(1, ge=1, description="Answers that are asked for from each page.")
    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    share: float = Field(
        1.0, gt=0, le=1, description="Of them, so many must be right for a page to be confirmed."
    )
    control: bool = Field(
        True,
        description="Ask without the page, too: what is answered right all the same confirms "
        "nothing.",
    )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A page that may have a question's fact.

    cosine: None without embeddings.
    by: overlap, embedding, or both."""

    page_id: str
    overlap: float
    cosine: float | None
    by: tuple[str, ...]


@dataclass(slots=True)
class Confirmed:
    """The result of a question.

    pages: gold page -> confirmed pages.
    answer_by_pair: the first answer from each of them.
    refused, failed: numbers of pairs of gold page and page."""

    outcome: Became
    pages: dict[str, list[str]] = field(default_factory=dict)
    answer_by_pair: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: int = 0
    failed: int = 0


@dataclass(slots=True)
class Proposed:
    """The pages, the proposals by question id, the servers for the manifest, and the results."""

    retriever: Retriever
    proposals: Mapping[str, Sequence[Proposal]]
    servers: Mapping[str, Any]
    results: Mapping[str, Confirmed] = field(default_factory=dict)


class Alternatives(Step[AlternativesConfig]):
    """Find pages that carry the same fact as a gold page, and add them to the rows.

    Proposed by text overlap and embeddings; confirmed by the generator's answer from such a page.
    """

    name = "alternatives"
    title = "Alternatives"
    config = AlternativesConfig
    options = ("out", "some_runs", "config", "set_", "estimate", "overwrite")
    also = ("answering",)
    asks = ("generator", "judge")
    moves = ("data",)

    def plan(self, work: Work[AlternativesConfig]) -> list[WorkItem]:
        """Return an item for each question, with as many pages as may be proposed."""
        cfg = work.settings
        max_pages = cfg.most * (2 if cfg.embeddings_url is not None else 1)
        items = []
        for prompt in work.prompts:
            question, image_counts = prompt.question, list[int]()
            if question.gold and question.reference_answer:
                golds = len(question.gold)
                image_counts = [golds, *([golds] * max_pages + [golds - 1] * cfg.control) * golds]
            calls = [trial_usage(question, n, cfg.times, work.answering) for n in image_counts]
            items.append(WorkItem(question.id, question, sum_usage(calls)))
        return items

    @contextmanager
    def resources(self, work: Work[AlternativesConfig]) -> Iterator[Proposed]:
        """Open the pages, and propose some for each question. Raises UserError."""
        pages, cfg = work.retriever, work.settings
        retriever = Retriever(pages.url, timeout_s=pages.timeout_s, deadline_s=pages.deadline_s)
        with retriever, _embedder(cfg) as (embed, model):
            index = retriever.info()
            questions = [prompt.question for prompt in work.prompts]
            proposals = propose(questions, retriever, cfg, embed)
            generator = work.answering.generator.model
            servers = {"index": index.revision, "generator": generator, "embedder": model}
            yield Proposed(retriever, proposals, servers)

    async def ask(
        self, item: WorkItem, asking: Asking, work: Work[AlternativesConfig]
    ) -> Confirmed:
        """Return the confirmed pages of a question."""
        proposed: Proposed = work.resources

        async def load_image(page_id: str) -> bytes:
            max_pixels = work.answering.generator.max_pixels
            return await asyncio.to_thread(
                lambda: page_within(proposed.retriever.image(page_id), max_pixels)
            )

        proposals = proposed.proposals.get(item.key, ())
        return await confirm(asking, item.subject, proposals, load_image, work.settings)

    def decide(self, work: Work[AlternativesConfig], answers: Mapping[str, Any]) -> Outcome:
        """Return all rows with the confirmed pages in `alternatives`; none is dropped."""
        outcome = super().decide(work, answers)
        outcome.extra = work.resources.servers
        work.resources.results = answers
        return outcome

    def decide_one(
        self, prompt: CuratedPrompt, work: Work[AlternativesConfig], answer: Any
    ) -> Decision:
        """Return the decision about a row.

        answer: its confirmed pages.
        """
        question, result = prompt.question, answer
        proposed = work.resources.proposals.get(question.id, ())
        extended = {
            gold: list(
                dict.fromkeys([*question.alternatives.get(gold, ()), *result.pages.get(gold, ())])
            )
            for gold in question.gold
        }
        stats = {
            "proposed": [page.page_id for page in proposed],
            "confirmed": result.pages,
            "refused": result.refused,
            "failed": result.failed,
            "known": sum(map(len, question.alternatives.values())),
            "document": question.file_name,
            "question_type": question.question_type,
        }
        row = question_row(
            question, alternatives={g: pages for g, pages in extended.items() if pages}
        )
        return Decision(question.id, True, result.outcome, stats, refs(prompt), row)

    def sections(self, work: Work[AlternativesConfig], outcome: Outcome) -> list[Section]:
        """Return outcomes, sources of proposals, and all confirmed pages."""
        results, proposals, prompts = work.resources.results, work.resources.proposals, work.by_id
        counts = Counter(decision.reason for decision in outcome.decisions)
        outcomes = [[name, counts[name], meaning] for name, meaning in BECAME.items()]
        by: Counter[tuple[str, bool]] = Counter()
        rows = []
        for name, result in results.items():
            proposal_by_page = {page.page_id: page for page in proposals.get(name, ())}
            pages = {page for page_list in result.pages.values() for page in page_list}
            by.update(
                (" and ".join(decision.by), decision.page_id in pages)
                for decision in proposal_by_page.values()
            )
            for (gold, page), answer in result.answer_by_pair.items():
                decision, question = proposal_by_page[page], prompts[name].question
                texts = [question.question, question.reference_text, answer, gold, page]
                rows.append([*texts, decision.overlap, decision.cosine])
        proposers = sorted({name for name, _ in by})
        sources = [[name, by[name, True] + by[name, False], by[name, True]] for name in proposers]
        head = ["question", "reference", "answer", "gold page", "the same on", "overlap", "cosine"]
        words = f"{len(rows)} pairs of a gold page and another that carries its fact."
        return [
            Section("Rows", [], ["became", "rows", ""], outcomes),
            Section("Who proposed", [], ["by", "pages proposed", "confirmed"], sources),
            Section("The same fact elsewhere", [words], head, rows[:_ROWS]),
        ]


async def confirm(
    asking: Asking,
    question: Question,
    proposals: Sequence[Proposal],
    load_image: LoadImage,
    cfg: AlternativesConfig,
) -> Confirmed:
    """Test each proposed page in the place of each gold page.

    This requires that the generator answers right from the gold pages, and not without one of them.
    load_image: page id -> PNG.
    """
    if not proposals:
        is_usable = question.gold and question.reference_answer
        return Confirmed("none_proposed" if is_usable else "no_gold")

    async def try_pages(pages: Sequence[str]) -> AnswerTrials:
        pngs = await asyncio.gather(*(load_image(page) for page in pages))
        return await asking.try_answers(question, pngs, cfg.times)

    share = (await try_pages(question.gold)).share(cfg.right)
    if share is None or share < cfg.share:
        return Confirmed("undecided" if share is None else "gold_fails")
    result = Confirmed("none_confirmed")
    for gold in question.gold:
        other_golds = [page for page in question.gold if page != gold]
        if cfg.control:
            share_without = (await try_pages(other_golds)).share(cfg.right)
            if share_without is None or share_without > 0:
                result.outcome = "undecided" if share_without is None else "known_without"
                continue
        page_sets = [
            [proposal.page_id if p == gold else p for p in question.gold] for proposal in proposals
        ]
        answers = await asyncio.gather(*(try_pages(pages) for pages in page_sets))
        for proposal, answer in zip(proposals, answers, strict=True):
            share = answer.share(cfg.right)
            result.failed += share is None
            result.refused += share is not None and share < cfg.share
            if share is not None and share >= cfg.share:
                result.pages.setdefault(gold, []).append(proposal.page_id)
                result.answer_by_pair[gold, proposal.page_id] = answer.answers[0] or ""
    if result.pages:
        result.outcome = "grown"
    elif result.failed:
        result.outcome = "undecided"
    return result


@contextmanager
def _embedder(cfg: AlternativesConfig) -> Iterator[tuple[Embed | None, str | None]]:
    """Open the embeddings server of the config; yield its function and model, or None."""
    if cfg.embeddings_url is None:
        yield None, None
        return
    with Embeddings(cfg.embeddings_url, model=cfg.embeddings_model) as embeddings:

        def embed(texts: Sequence[str]) -> list[Sequence[float] | None]:
            vectors = embeddings.embed(texts)
            return [None if isinstance(vector, SampleError) else vector for vector in vectors]

        yield embed, embeddings.info().model


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
