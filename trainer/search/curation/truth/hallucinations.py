"""`search hallucinations`: right answers without their gold evidence, and where they come from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainer.search.curation.asking import Asking, ToAsk, Tried
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import Curated, Decision, question_row
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import (
    CuratedPrompt,
    CuratedRun,
    Sample,
    covered_facts,
    evidence_pages,
    has_evidence,
)
from trainer.search.curation.truth.config import HallucinationsConfig, Kind
from trainer.search.records import Question, Trajectory
from trainer.sft.curation_record import CurationRecord

#: Where a right answer without its gold evidence comes from, in the order of the rules.
KINDS: Final[Mapping[Kind, str]] = {
    "no_search": "no page was shown at all",
    "undecided": "a call failed",
    "own_knowledge": "the generator answers right without any picture",
    "partial": "of several gold pages some were shown, not all",
    "same_document": "it answers right from those of the pictures that are of a gold page's "
    "document",
    "same_data": "it answers right from all pictures that it was shown: the same data elsewhere",
    "luck": "asked again with the same pictures, it is not right",
}
NONE = "none"
_ROWS = 40  # of a kind, on the page
#: (order of the run, SHA-256) -> PNG.
Pictures = Callable[[int, str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """An episode that was judged right, and was not shown all gold pages or others with their
    facts.

    order: of its run. evidence: SHA-256 of what the generator was shown. near: those of them that
    are of a gold page's document. partial: whether some gold page was shown. said: the answer.
    """

    ref: str
    order: int
    evidence: tuple[str, ...]
    near: tuple[str, ...]
    partial: bool
    said: str


def suspect_of(trajectory: Trajectory, sample: Sample, cfg: HallucinationsConfig) -> Suspect | None:
    """None for an episode that is not suspected: judged wrong, or not at all, or with all of its
    evidence among the pictures that the generator was sent."""
    asked, answer = trajectory.question, trajectory.answer
    if sample.judge is None or sample.judge < cfg.right or answer is None or answer.text is None:
        return None
    if has_evidence(trajectory):
        return None
    covered = covered_facts(asked, evidence_pages(trajectory))
    documents = {gold.rpartition("_")[0] for gold in asked.gold}
    near = {
        view.image
        for turn in trajectory.turns
        for view in turn.views
        if view.page_id.rpartition("_")[0] in documents
    }
    return Suspect(
        ref=sample.ref,
        order=sample.order,
        evidence=tuple(answer.evidence),
        near=tuple(image for image in answer.evidence if image in near),
        partial=any(covered),
        said=answer.text,
    )


async def kind_of(
    asking: Asking, question: Question, one: Suspect, pictures: Pictures, cfg: HallucinationsConfig
) -> Kind:
    """Where its answer comes from; equal questions about equal pictures are asked once."""

    async def right(images: Iterable[str]) -> float | None:
        pngs = await asyncio.gather(*(pictures(one.order, image) for image in images))
        asked = question.question, question.reference_answer
        tried: Tried = await asking.tried(*asked, pngs, cfg.times)
        return tried.share(cfg.right)

    if not one.evidence:
        return "no_search"
    share = await right(())
    if share is None or share >= cfg.share:
        return "undecided" if share is None else "own_knowledge"
    if one.partial:
        return "partial"
    kinds: list[tuple[tuple[str, ...], Kind]] = [
        (one.near, "same_document"),
        (one.evidence, "same_data"),
    ]
    for images, kind in kinds:
        share = await right(images) if images else 0.0
        if share is None or share >= cfg.share:
            return "undecided" if share is None else kind
    return "luck"


def asked_at_most(
    suspects: Mapping[str, Sequence[Suspect]],
    questions: Mapping[str, Question],
    cfg: HallucinationsConfig,
) -> list[ToAsk]:
    """All that may be asked, equal ones once."""
    found = []
    for name, those in suspects.items():
        sets = dict.fromkeys(
            images
            for one in those
            if one.evidence
            for images in ((), *(() if one.partial else (one.near, one.evidence)))
        )
        none = any(one.evidence for one in those)
        asked = questions[name]
        found += [
            ToAsk(asked.question, asked.reference_answer, len(images), cfg.times)
            for images in sets
            if images or none
        ]
    return found


def make_hallucinations(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    suspects: Mapping[str, Sequence[Suspect]],
    kinds: Mapping[str, Kind],
    record: CurationRecord | None = None,
) -> Curated:
    """All prompts of the data with the kind that most of their suspects have; those of the kinds
    that the config names are dropped.

    suspects: by the question's id. kinds: by the episode's `Sample.ref`. record: what was decided
    before.
    """
    of = cfg.hallucinations
    made = Curated("hallucinations", of, read, record=record or CurationRecord())
    for prompt in prompts:
        those = suspects.get(prompt.question.id, ())
        counts = Counter(kinds[one.ref] for one in those)
        reason = _main(counts)
        right = sum(one.judge is not None and one.judge >= of.right for one in prompt.samples)
        figures = {
            "kinds": {name: counts[name] for name in KINDS if counts[name]},
            "right": right,
            "suspects": len(those),
            "episode_kinds": {one.ref: kinds[one.ref] for one in those},
            "document": prompt.question.file_name,
            "question_type": prompt.question.question_type,
        }
        kept = reason not in of.drop
        episodes = [one.ref for one in those]
        made.decisions.append(Decision(prompt.question.id, kept, reason, figures, episodes))
        if kept:
            made.rows.append(question_row(prompt.question))
    total = Counter(kinds[one.ref] for those in suspects.values() for one in those)
    made.told = {"kinds": {name: total[name] for name in KINDS if total[name]}}
    return made


def _main(counts: Counter[Kind]) -> str:
    """The most frequent; of equals the one whose rule comes first; undecided last of all."""
    order = [name for name in KINDS if name != "undecided"]
    there = [name for name in order if counts[name]]
    if not there:
        return "undecided" if counts else NONE
    return min(there, key=lambda name: (-counts[name], order.index(name)))


def hallucinations_page(
    made: Curated,
    prompts: Mapping[str, CuratedPrompt],
    suspects: Mapping[str, Sequence[Suspect]],
    kinds: Mapping[str, Kind],
) -> str:
    """report.html: how many right answers lack their evidence, of which kind, and examples."""
    right = sum(int(one.figures["right"]) for one in made.decisions)
    all_suspects = sum(map(len, suspects.values()))
    words = (
        f"{right} episodes were judged right; {all_suspects} of them were not shown all gold "
        "pages, or others that are known to carry their facts."
    )
    of = Counter(one.reason for one in made.decisions)
    total: Mapping[str, int] = made.told["kinds"]
    counts = [[name, total.get(name, 0), of[name], meaning] for name, meaning in KINDS.items()]
    sections = [Section("Right without gold evidence", [words], _HEAD, counts)]
    for name, meaning in KINDS.items():
        rows: list[list[Any]] = [
            [asked.question, asked.reference_answer, one.said, one.ref]
            for question, those in suspects.items()
            for one in those
            if kinds[one.ref] == name
            for asked in (prompts[question].question,)
        ]
        head = ["question", "reference", "answer", "episode"]
        if rows:
            sections.append(Section(f"{name}: {meaning}", [], head, rows[:_ROWS]))
    return curation_page(made, "Hallucinations", sections, prompts)


_HEAD = ["kind", "episodes", "prompts", ""]
