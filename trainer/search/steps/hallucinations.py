"""The step `hallucinations`: find sources of right answers without gold evidence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field

from scorekit.config import Config
from trainer.search.data import documents, question_row
from trainer.search.records import SUCCESS, Question, Trajectory
from trainer.search.steps.asking import Asking, sum_usage, trial_usage
from trainer.search.steps.episodes import (
    EpisodeSummary,
    covered_facts,
    has_all_evidence,
)
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work, WorkItem
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.sft.curation_record import RecordEntry, Verdict

#: Sources of a right answer without its gold evidence (`hallucinations`).
Kind = Literal[
    "no_search", "undecided", "own_knowledge", "partial", "same_document", "same_data", "luck"
]

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

#: Kinds of answers without a gold page whose visible images have the fact.
_EVIDENT: Final = ("same_document", "same_data")

NONE = "none"


_ROWS = 40  # max rows of a table


#: (order of the run, SHA-256) -> PNG.
LoadImage = Callable[[int, str], Awaitable[bytes]]


class HallucinationsConfig(Config):
    """The rules for right answers without gold evidence: docs/how-to/curate.md."""

    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    times: int = Field(1, ge=1, description="Answers that are asked for, of each kind.")
    share: float = Field(
        0.5, gt=0, le=1, description="Of them, so many right say that it was no accident."
    )
    drop: tuple[Kind, ...] = Field(
        ("own_knowledge",), description="Prompts of these classes are dropped."
    )


@dataclass(frozen=True, slots=True)
class Suspect:
    """An episode that was judged right without all gold pages or alternatives to them.

    question: its id.
    order: index of its run.
    evidence: SHA-256 of the generator's images.
    near: those of a gold page's document.
    partial: whether some gold page was sent.
    answer: the answer.
    """

    ref: str
    question: str
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
        question=question.id,
        order=sample.order,
        evidence=tuple(answer.evidence),
        near=tuple(
            image for image in answer.evidence if any(view.is_among([image]) for view in views)
        ),
        partial=any(covered),
        answer=answer.text,
    )


async def kind_of(
    asking: Asking,
    question: Question,
    suspect: Suspect,
    load_image: LoadImage,
    cfg: HallucinationsConfig,
) -> Kind:
    """Return the source of a suspect's answer. Equal requests are paid for once."""

    async def share_right(images: Iterable[str]) -> float | None:
        pngs = await asyncio.gather(*(load_image(suspect.order, image) for image in images))
        return (await asking.try_answers(question, pngs, cfg.times)).share(cfg.right)

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


def _main(counts: Counter[Kind]) -> str:
    """Return the most frequent kind; of equal ones the first rule; undecided is the last."""
    present = [name for name in KINDS if counts[name] and name != "undecided"]
    if not present:
        return "undecided" if counts else NONE
    return max(present, key=lambda name: counts[name])


class Hallucinations(Step[HallucinationsConfig]):
    """Find the sources of right answers without gold evidence, with new calls."""

    name = "hallucinations"
    title = "Hallucinations"
    config = HallucinationsConfig
    options = ("run", "out", "record", "config", "set_", "estimate", "overwrite")
    also = ("answering",)
    asks = ("generator", "judge")
    moves = ("record",)
    records = True
    drops = True

    def note(
        self, trajectory: Trajectory, sample: EpisodeSummary, settings: HallucinationsConfig
    ) -> Suspect | None:
        """Return the suspect of an episode, or None."""
        return suspect_of(trajectory, sample, settings)

    def plan(self, work: Work[HallucinationsConfig]) -> list[WorkItem]:
        """Return an item for each suspect; calls that are equal to earlier ones are not planned."""
        suspects, items = _by_question(work), []
        for prompt in work.prompts:
            planned_sets: set[tuple[str, ...]] = set()
            for suspect in suspects.get(prompt.question.id, ()):
                sets = [()] if suspect.partial else [(), suspect.near, suspect.evidence]
                new = set(sets if suspect.evidence else ()) - planned_sets
                planned_sets |= new
                calls = [
                    trial_usage(prompt.question, len(images), work.settings.times, work.answering)
                    for images in new
                ]
                items.append(WorkItem(suspect.ref, (prompt.question, suspect), sum_usage(calls)))
        return items

    def resources(self, work: Work[HallucinationsConfig]) -> AbstractContextManager[Any]:
        """Open the episodes of all runs."""
        return nullcontext([TrajectoryStore(run.folder / FOLDER) for run in work.runs])

    async def ask(self, item: WorkItem, asking: Asking, work: Work[HallucinationsConfig]) -> Kind:
        """Return the kind of a suspect, with the images of its run."""
        question, suspect = item.subject

        async def load_image(order: int, sha256: str) -> bytes:
            return await asyncio.to_thread(work.resources[order].read_image, sha256)

        return await kind_of(asking, question, suspect, load_image, work.settings)

    def decide(self, work: Work[HallucinationsConfig], answers: Mapping[str, Any]) -> Outcome:
        """Return all prompts with the most frequent kind of their suspects.

        Prompts of the kinds in `drop` are dropped.
        """
        settings, suspects, kinds = work.settings, _by_question(work), answers
        outcome = self.outcome(work)
        for prompt in work.prompts:
            group = suspects.get(prompt.question.id, ())
            counts = Counter(kinds[suspect.ref] for suspect in group)
            reason = _main(counts)
            stats = {
                "kinds": {name: counts[name] for name in KINDS if counts[name]},
                "right": sum(sample.is_right(settings.right) for sample in prompt.samples),
                "suspects": len(group),
                "episode_kinds": {suspect.ref: kinds[suspect.ref] for suspect in group},
                "document": prompt.question.file_name,
                "question_type": prompt.question.question_type,
            }
            is_kept = reason not in settings.drop
            episodes = [suspect.ref for suspect in group]
            row = question_row(prompt.question) if is_kept else None
            outcome.decisions.append(
                Decision(prompt.question.id, is_kept, reason, stats, episodes, row)
            )
        total = Counter(kinds[suspect.ref] for group in suspects.values() for suspect in group)
        outcome.extra = {"kinds": {name: total[name] for name in KINDS if total[name]}}
        return outcome

    def entries(self, row: Mapping[str, Any]) -> Iterator[RecordEntry]:
        """Yield an entry for a row with suspects or that is dropped, and for each suspect."""
        id, kinds = str(row["id"]), row.get("episode_kinds") or {}
        if kinds or not row["kept"]:
            reason = str(row["reason"])
            yield RecordEntry(id, self.name, "keep" if row["kept"] else "drop", reason)
        for episode, kind in kinds.items():
            verdict: Verdict = (
                "keep" if kind in _EVIDENT else "open" if kind == "undecided" else "drop"
            )
            yield RecordEntry(id, self.name, verdict, str(kind), str(episode))

    def sections(self, work: Work[HallucinationsConfig], outcome: Outcome) -> list[Section]:
        """Return right answers without evidence, their kinds, and examples."""
        suspects, prompts = _by_question(work), work.by_id
        kinds = {
            ref: kind
            for item in outcome.decisions
            for ref, kind in item.stats["episode_kinds"].items()
        }
        right = sum(int(item.stats["right"]) for item in outcome.decisions)
        all_suspects = sum(map(len, suspects.values()))
        words = (
            f"{right} episodes were judged right; {all_suspects} of them were not shown all gold "
            "pages, or others that are known to carry their facts."
        )
        counts_by_reason = Counter(item.reason for item in outcome.decisions)
        total: Mapping[str, int] = outcome.extra["kinds"]
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
        return sections


def _by_question(work: Work[HallucinationsConfig]) -> dict[str, list[Suspect]]:
    """Return the suspects by question id, in the order of the episodes."""
    suspects: dict[str, list[Suspect]] = {}
    for suspect in work.notes.values():
        suspects.setdefault(suspect.question, []).append(suspect)
    return suspects
