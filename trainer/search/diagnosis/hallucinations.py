"""The command `search hallucinations`: find sources of right answers without gold evidence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import HallucinationsConfig, Kind
from trainer.search.curation.dataset import CurationResult, Decision, question_row
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.reanswer import AnswerSampler, PlannedCalls
from trainer.search.curation.samples import (
    CuratedPrompt,
    CuratedRun,
    EpisodeSummary,
    covered_facts,
    has_all_evidence,
)
from trainer.search.data import documents
from trainer.search.records import Question, Trajectory

#: The sources of right answers without gold evidence, in the order of the rules.
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
_ROWS = 40  # max rows of a table
#: (order of the run, SHA-256) -> PNG.
LoadImage = Callable[[int, str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """An episode that was judged right without all gold pages or alternatives to them.

    order: index of its run. evidence: SHA-256 of the generator's images. near: those of a gold
    page's document. partial: whether some gold page was visible. answer: the answer.
    """

    ref: str
    order: int
    evidence: tuple[str, ...]
    near: tuple[str, ...]
    partial: bool
    answer: str


def suspect_of(
    trajectory: Trajectory, sample: EpisodeSummary, cfg: HallucinationsConfig
) -> Suspect | None:
    """Return the suspect of an episode.

    None if it was judged wrong, was not judged, or if the generator got all its evidence.
    """
    question, answer = trajectory.question, trajectory.answer
    if not sample.is_right(cfg.right) or answer is None or answer.text is None:
        return None
    if has_all_evidence(trajectory):
        return None
    covered = covered_facts(question, trajectory.sent_pages)
    views = [
        view
        for turn in trajectory.turns
        for view in turn.views
        if view.page_id.rpartition("_")[0] in documents(question)
    ]
    return Suspect(
        ref=sample.ref,
        order=sample.order,
        evidence=tuple(answer.evidence),
        near=tuple(
            image for image in answer.evidence if any(view.is_among([image]) for view in views)
        ),
        partial=any(covered),
        answer=answer.text,
    )


async def kind_of(
    asking: AnswerSampler,
    question: Question,
    suspect: Suspect,
    load_image: LoadImage,
    cfg: HallucinationsConfig,
) -> Kind:
    """Return the source of a suspect's answer. Equal requests are paid for once."""

    async def share_right(images: Iterable[str]) -> float | None:
        pngs = await asyncio.gather(*(load_image(suspect.order, image) for image in images))
        return (await asking.tried(question, pngs, cfg.times)).share(cfg.right)

    if not suspect.evidence:
        return "no_search"
    share = await share_right(())
    if share is None or share >= cfg.share:
        return "undecided" if share is None else "own_knowledge"
    if suspect.partial:
        return "partial"
    kinds: list[tuple[tuple[str, ...], Kind]] = [
        (suspect.near, "same_document"),
        (suspect.evidence, "same_data"),
    ]
    for images, kind in kinds:
        share = await share_right(images) if images else 0.0
        if share is None or share >= cfg.share:
            return "undecided" if share is None else kind
    return "luck"


def max_requests(
    suspects: Mapping[str, Sequence[Suspect]],
    questions: Mapping[str, Question],
    cfg: HallucinationsConfig,
) -> list[PlannedCalls]:
    """Return the max planned calls, equal ones once."""
    planned = []
    for name, group in suspects.items():
        sets = dict.fromkeys(
            images
            for suspect in group
            if suspect.evidence
            for images in ((), *(() if suspect.partial else (suspect.near, suspect.evidence)))
        )
        planned += [PlannedCalls(questions[name], len(images), cfg.times) for images in sets]
    return planned


def make_hallucinations(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    suspects: Mapping[str, Sequence[Suspect]],
    kinds: Mapping[str, Kind],
    decided: PriorDecisions,
) -> CurationResult:
    """Return all prompts with the most frequent kind of their suspects.

    Prompts of the kinds in `drop` are dropped. suspects: by question id. kinds: by
    `EpisodeSummary.ref`.
    """
    section = cfg.hallucinations
    result = CurationResult("hallucinations", section, read, decided.inputs, record=decided.record)
    for prompt in prompts:
        group = suspects.get(prompt.question.id, ())
        counts = Counter(kinds[suspect.ref] for suspect in group)
        reason = _main(counts)
        stats = {
            "kinds": {name: counts[name] for name in KINDS if counts[name]},
            "right": sum(sample.is_right(section.right) for sample in prompt.samples),
            "suspects": len(group),
            "episode_kinds": {suspect.ref: kinds[suspect.ref] for suspect in group},
            "document": prompt.question.file_name,
            "question_type": prompt.question.question_type,
        }
        is_kept = reason not in section.drop
        episodes = [suspect.ref for suspect in group]
        result.decisions.append(Decision(prompt.question.id, is_kept, reason, stats, episodes))
        if is_kept:
            result.rows.append(question_row(prompt.question))
    total = Counter(kinds[suspect.ref] for group in suspects.values() for suspect in group)
    result.manifest_extra = {"kinds": {name: total[name] for name in KINDS if total[name]}}
    return result


def _main(counts: Counter[Kind]) -> str:
    """Return the most frequent kind; of equal ones the first rule; undecided is the last."""
    present = [name for name in KINDS if counts[name] and name != "undecided"]
    if not present:
        return "undecided" if counts else NONE
    return max(present, key=lambda name: counts[name])


def hallucinations_page(
    result: CurationResult,
    prompts: Mapping[str, CuratedPrompt],
    suspects: Mapping[str, Sequence[Suspect]],
    kinds: Mapping[str, Kind],
) -> str:
    """Return report.html: right answers without evidence, their kinds, and examples."""
    right = sum(int(item.stats["right"]) for item in result.decisions)
    all_suspects = sum(map(len, suspects.values()))
    words = (
        f"{right} episodes were judged right; {all_suspects} of them were not shown all gold "
        "pages, or others that are known to carry their facts."
    )
    counts_by_reason = Counter(item.reason for item in result.decisions)
    total: Mapping[str, int] = result.manifest_extra["kinds"]
    counts = [
        [name, total.get(name, 0), counts_by_reason[name], meaning]
        for name, meaning in KINDS.items()
    ]
    head = ["kind", "episodes", "prompts", ""]
    sections = [Section("Right without gold evidence", [words], head, counts)]
    head = ["question", "reference", "answer", "episode"]
    for name, meaning in KINDS.items():
        rows: list[list[Any]] = [
            [content.question, content.reference_text, item.answer, item.ref]
            for question, group in suspects.items()
            for item in group
            if kinds[item.ref] == name
            for content in (prompts[question].question,)
        ]
        if rows:
            sections.append(Section(f"{name}: {meaning}", [], head, rows[:_ROWS]))
    return curation_page(result, "Hallucinations", sections, prompts)
