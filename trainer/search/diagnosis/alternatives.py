"""The command `search alternatives`: find other pages with the fact.

The generator confirms a page if it answers right with this page instead of the gold page.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import AlternativesConfig
from trainer.search.curation.dataset import CurationResult, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.reanswer import AnswerSampler, AnswerTrials, PlannedCalls
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.search.diagnosis.proposals import Proposal
from trainer.search.records import Question

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


@dataclass(slots=True)
class Confirmed:
    """The result of a question. pages: gold page -> confirmed pages. answer_by_pair: the first
    answer from each of them. refused, failed: numbers of pairs of gold page and page."""

    outcome: Became
    pages: dict[str, list[str]] = field(default_factory=dict)
    answer_by_pair: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: int = 0
    failed: int = 0


async def confirm(
    asking: AnswerSampler,
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

    async def tried(pages: Sequence[str]) -> AnswerTrials:
        pngs = await asyncio.gather(*(load_image(page) for page in pages))
        return await asking.tried(question, pngs, cfg.times)

    share = (await tried(question.gold)).share(cfg.right)
    if share is None or share < cfg.share:
        return Confirmed("undecided" if share is None else "gold_fails")
    result = Confirmed("none_confirmed")
    for gold in question.gold:
        other_golds = [page for page in question.gold if page != gold]
        if cfg.control:
            share_without = (await tried(other_golds)).share(cfg.right)
            if share_without is None or share_without > 0:
                result.outcome = "undecided" if share_without is None else "known_without"
                continue
        page_sets = [
            [proposal.page_id if p == gold else p for p in question.gold] for proposal in proposals
        ]
        answers = await asyncio.gather(*(tried(pages) for pages in page_sets))
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


def max_requests(questions: Sequence[Question], cfg: AlternativesConfig) -> list[PlannedCalls]:
    """Return the max planned calls, with as many pages as may be proposed."""
    max_pages = cfg.most * (2 if cfg.embeddings_url is not None else 1)
    planned = []
    for question in questions:
        if question.gold and question.reference_answer:
            golds = len(question.gold)
            image_counts = [golds, *([golds] * max_pages + [golds - 1] * cfg.control) * golds]
            planned += [PlannedCalls(question, n, cfg.times) for n in image_counts]
    return planned


def make_alternatives(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    proposals: Mapping[str, Sequence[Proposal]],
    results: Mapping[str, Confirmed],
    manifest_extra: Mapping[str, Any],
) -> CurationResult:
    """Return all rows with the confirmed pages in `alternatives`; none is dropped.

    proposals, results: by question id. manifest_extra: index and generator, for the manifest.
    """
    curated = CurationResult("alternatives", cfg.alternatives, read, manifest_extra=manifest_extra)
    for prompt in prompts:
        question = prompt.question
        result, proposed = results[question.id], proposals.get(question.id, ())
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
        curated.decisions.append(Decision(question.id, True, result.outcome, stats, refs(prompt)))
        curated.rows.append(
            question_row(
                question, alternatives={g: pages for g, pages in extended.items() if pages}
            )
        )
    return curated


def alternatives_page(
    curated: CurationResult,
    prompts: Mapping[str, CuratedPrompt],
    proposals: Mapping[str, Sequence[Proposal]],
    results: Mapping[str, Confirmed],
) -> str:
    """Return report.html: outcomes, sources of proposals, and all confirmed pages."""
    counts = Counter(decision.reason for decision in curated.decisions)
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
    sections = [
        Section("Rows", [], ["became", "rows", ""], outcomes),
        Section("Who proposed", [], ["by", "pages proposed", "confirmed"], sources),
        Section("The same fact elsewhere", [words], head, rows[:_ROWS]),
    ]
    return curation_page(curated, "Alternatives", sections, prompts)
