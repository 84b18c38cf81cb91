"""`search alternatives`: other pages that carry the fact, confirmed by the generator that answers
from such a page in the gold one's place."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trainer.search.curation.asking import Asking, ToAsk, Tried
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import Curated, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.search.curation.truth.config import AlternativesConfig
from trainer.search.curation.truth.proposals import Proposal
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
#: What becomes of a row, in the order in which it is looked at.
BECAME: Final[Mapping[Became, str]] = {
    "no_gold": "the row names no gold page, or has no reference",
    "none_proposed": "no page is like enough to be asked about",
    "undecided": "a call failed, and no page was confirmed",
    "gold_fails": "the generator does not answer right from the gold pages: it confirms nothing",
    "known_without": "it answers right without a gold page, too: that confirms nothing",
    "none_confirmed": "from no proposed page it answers right",
    "grown": "at least one page was confirmed, and stands under `alternatives` now",
}
_ROWS = 200  # on the page
Pictures = Callable[[str], Awaitable[bytes]]


@dataclass(slots=True)
class Confirmed:
    """What the generator said about one question. pages: gold page -> confirmed ones. said: the
    first answer from each of them. refused, failed: pairs of gold and page."""

    became: Became
    pages: dict[str, list[str]] = field(default_factory=dict)
    said: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: int = 0
    failed: int = 0


async def confirm(
    asking: Asking,
    question: Question,
    proposals: Sequence[Proposal],
    pictures: Pictures,
    cfg: AlternativesConfig,
) -> Confirmed:
    """Ask about every proposed page in the place of each gold page, where the generator can tell:
    it answers right from the gold pages, and not without one of them.

    pictures: page id -> PNG.
    """
    if not proposals:
        able = question.gold and question.reference_answer
        return Confirmed("none_proposed" if able else "no_gold")

    async def tried(pages: Sequence[str]) -> Tried:
        pngs = await asyncio.gather(*(pictures(page) for page in pages))
        asked = question.question, question.reference_answer
        return await asking.tried(*asked, pngs, cfg.times)

    share = (await tried(question.gold)).share(cfg.right)
    if share is None or share < cfg.share:
        return Confirmed("undecided" if share is None else "gold_fails")
    found = Confirmed("none_confirmed")
    for gold in question.gold:
        others = [page for page in question.gold if page != gold]
        if cfg.control:
            alone = (await tried(others)).share(cfg.right)
            if alone is None or alone > 0:
                found.became = "undecided" if alone is None else "known_without"
                continue
        places = [[one.page_id if p == gold else p for p in question.gold] for one in proposals]
        answers = await asyncio.gather(*(tried(pages) for pages in places))
        for one, answer in zip(proposals, answers, strict=True):
            share = answer.share(cfg.right)
            found.failed += share is None
            found.refused += share is not None and share < cfg.share
            if share is not None and share >= cfg.share:
                found.pages.setdefault(gold, []).append(one.page_id)
                found.said[gold, one.page_id] = answer.answers[0] or ""
    if found.pages:
        found.became = "grown"
    elif found.failed:
        found.became = "undecided"
    return found


def asked_at_most(questions: Sequence[Question], cfg: AlternativesConfig) -> list[ToAsk]:
    """All that may be asked: as many pages as may be proposed, whoever proposes them."""
    each = cfg.most * (2 if cfg.embeddings_url is not None else 1)
    found = []
    for one in questions:
        if one.gold and one.reference_answer:
            golds = len(one.gold)
            pictures = [golds, *([golds] * each + [golds - 1] * cfg.control) * golds]
            found += [ToAsk(one.question, one.reference_answer, n, cfg.times) for n in pictures]
    return found


def make_alternatives(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    proposals: Mapping[str, Sequence[Proposal]],
    results: Mapping[str, Confirmed],
    told: Mapping[str, Any],
) -> Curated:
    """All rows of the data, their `alternatives` grown by what was confirmed; none is dropped.

    proposals, results: by the question's id. told: which index and generator said so.
    """
    made = Curated("alternatives", cfg.alternatives, read, told=told)
    for prompt in prompts:
        one = prompt.question
        result, proposed = results[one.id], proposals.get(one.id, ())
        grown = {
            gold: list(
                dict.fromkeys([*one.alternatives.get(gold, ()), *result.pages.get(gold, ())])
            )
            for gold in one.gold
        }
        figures = {
            "proposed": [page.page_id for page in proposed],
            "confirmed": result.pages,
            "refused": result.refused,
            "failed": result.failed,
            "known": sum(map(len, one.alternatives.values())),
            "document": one.file_name,
            "question_type": one.question_type,
        }
        made.decisions.append(Decision(one.id, True, result.became, figures, refs(prompt)))
        made.rows.append(question_row(one, alternatives={g: of for g, of in grown.items() if of}))
    return made


def alternatives_page(
    made: Curated,
    prompts: Mapping[str, CuratedPrompt],
    proposals: Mapping[str, Sequence[Proposal]],
    results: Mapping[str, Confirmed],
) -> str:
    """report.html: what became of the rows, who proposed, and every page that was confirmed."""
    of = Counter(one.reason for one in made.decisions)
    became = [[name, of[name], meaning] for name, meaning in BECAME.items()]
    by: Counter[tuple[str, bool]] = Counter()
    rows = []
    for name, result in results.items():
        known = {page.page_id: page for page in proposals.get(name, ())}
        pages = {page for found in result.pages.values() for page in found}
        by.update((" and ".join(one.by), one.page_id in pages) for one in known.values())
        for (gold, page), said in result.said.items():
            one, asked = known[page], prompts[name].question
            told = [asked.question, asked.reference_answer, said, gold, page]
            rows.append([*told, one.overlap, one.cosine])
    who = [[name, by[name, True] + by[name, False], by[name, True]] for name in _names(by)]
    head = ["question", "reference", "answer", "gold page", "the same on", "overlap", "cosine"]
    words = f"{len(rows)} pairs of a gold page and another that carries its fact."
    sections = [
        Section("Rows", [], ["became", "rows", ""], became),
        Section("Who proposed", [], ["by", "pages proposed", "confirmed"], who),
        Section("The same fact elsewhere", [words], head, rows[:_ROWS]),
    ]
    return curation_page(made, "Alternatives", sections, prompts)


def _names(by: Mapping[tuple[str, bool], int]) -> list[str]:
    return sorted({name for name, _ in by})
