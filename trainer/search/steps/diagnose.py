"""The step `diagnose`: find out why prompts score low, with their episodes.

An episode has the first cause that applies.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from pydantic import Field

from scorekit.config import Config
from scorekit.numeric import below
from trainer.search.data import documents, question_row
from trainer.search.records import SUCCESS, Question, Trajectory
from trainer.search.steps.agreement import flat, parts_of
from trainer.search.steps.episodes import (
    Combine,
    CuratedPrompt,
    EpisodeSummary,
    Measure,
    carriers,
    has_all_evidence,
    of_same_part,
)
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work
from trainer.sft.curation_record import VERIFY, RecordEntry, Verdict

Corner = Literal["found_right", "found_wrong", "missed_right", "missed_wrong"]


CORNERS: Final[Mapping[Corner, str]] = {
    "found_right": "gold found, answer right",
    "found_wrong": "gold found, answer wrong: not sent, or generator, judge or reference",
    "missed_right": "gold not found, answer right: `hallucinations` says how",
    "missed_wrong": "gold not found, answer wrong: searched wrong",
}


NOT_LOW = "not_low"

_DOCUMENTS = 60  # max rows of the table


class DiagnoseConfig(Config):
    """The rules for why a prompt scores low; docs/how-to/curate.md has their order."""

    measure: Measure = Field("judge", description="Mean over a prompt's episodes.")
    combine: Combine = Field("all", description="Which episodes count, as of `buckets`.")
    low: float = Field(0.5, description="A prompt is looked into whose mean is below this.")
    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    found: float = Field(
        0.0, ge=0, lt=1, description="NDCG against judge: found is an NDCG above this."
    )
    agree_least: int = Field(
        2, ge=2, description="Suspected reference: answers from the gold pages, at least."
    )
    agree_share: float = Field(
        0.6, gt=0, le=1, description="Of them, the share that says one and the same other thing."
    )
    invalid_share: float = Field(
        0.5, gt=0, le=1, description="`invalid`: malformed turns among an episode's own, at least."
    )
    early_searches: int = Field(
        1, ge=0, description="`ended_early`: the policy ended by itself after so many searches."
    )
    examples: int = Field(8, ge=0, description="Episodes of each corner on the page.")


Cause = Literal[
    "right",
    "gave_up",
    "unscored",
    "no_gold",
    "not_sent",
    "judge_suspected",
    "reference_suspected",
    "generator_failed",
    "invalid",
    "ended_early",
    "not_shown",
    "wrong_page",
    "forced",
    "never_hit",
]


#: The causes in the order of the rules, as on the page and in docs/how-to/curate.md.
CAUSES: Final[Mapping[Cause, str]] = {
    "right": "the answer was judged right; without a judge: the facts were shown",
    "gave_up": "the policy gave the search up",
    "unscored": "it has no score: a neighbour failed, or nobody was asked",
    "no_gold": "the question names no gold page: what was searched wrong is not known",
    "not_sent": "the facts were shown, and not all of them sent to the generator",
    "judge_suspected": "the facts were sent, and the answer, judged wrong, is the reference in "
    "the same words, or one that was judged right in another episode",
    "reference_suspected": "the facts were sent, and the answer is the one on which the answers "
    "agree, and which is not the reference's",
    "generator_failed": "the facts were sent, and the answer is wrong all the same",
    "invalid": "malformed turns took too many of its turns",
    "ended_early": "the policy ended by itself after too few searches",
    "not_shown": "a page with a missing fact stood among the hits, and was not shown",
    "wrong_page": "a page of the right document was shown, and not all facts",
    "forced": "its turns or its context were used up before the right document was found",
    "never_hit": "no page with a missing fact was among the hits of any search",
}


#: Phrases for a missing answer, in the form of `flat`.
_REFUSAL: Final = re.compile(
    r"\b(?:not|cannot|can t|unable|unknown|no (?:information|data|answer)|n a|unclear"
    r"|insufficient)\b"
    r"|알 수 없|없습니다|없다|없음|않습니다|않는다|않음|못"
)


#: Causes without an explanation: they count only if there is no other.
_UNSPECIFIC: Final = ("right", "unscored")


@dataclass(frozen=True, slots=True)
class EpisodeEvidence:
    """The data of an episode that its summary does not have.

    answer: the answer.
    asked_from: key of the images of the request.
    has_all_gold: whether each gold page, or an alternative, was visible.
    is_sent: whether the generator got each of these.
    hit: whether a missing one was among the hits of a search.
    document: whether a page of a gold page's document was visible.
    """

    answer: str | None
    asked_from: str
    has_all_gold: bool
    is_sent: bool
    hit: bool
    document: bool


def episode_evidence(trajectory: Trajectory) -> EpisodeEvidence:
    """Return the evidence of an episode."""
    question, page_ids, answer = trajectory.question, set(trajectory.shown_pages), trajectory.answer
    missing = {page for fact in question.facts if fact.isdisjoint(page_ids) for page in fact}
    hits = {hit.page_id for turn in trajectory.turns for hit in turn.hits}
    images = ",".join(answer.evidence) if answer is not None else ""
    return EpisodeEvidence(
        answer=answer.text if answer is not None else None,
        asked_from=images or trajectory.trajectory_id,
        has_all_gold=bool(page_ids) and not missing,
        is_sent=has_all_evidence(trajectory),
        hit=not missing.isdisjoint(hits),
        document=any(page.rpartition("_")[0] in documents(question) for page in page_ids),
    )


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Evidence against judge and reference in the answers to a question, as flat texts.

    right: answers that were judged right, and the reference.
    agreed: the common answer of episodes with all facts sent, if it contradicts the reference. None
    if they do not agree, if an answer with all facts was judged right, if an answer without them is
    equal, and if it cannot be read from a page (`_is_reading`).
    """

    right: frozenset[str]
    agreed: str | None


def suspicion(
    question: Question,
    samples: Sequence[EpisodeSummary],
    clues: Mapping[str, EpisodeEvidence],
    cfg: DiagnoseConfig,
    is_confirmed: bool = False,
) -> Suspicion:
    """Compare a prompt's answers with one another and with the reference.

    is_confirmed: `verify` found the reference right, so agreement does not count against it.
    """
    answers = [
        (sample, flat(text)) for sample in samples if (text := clues[sample.ref].answer) is not None
    ]
    right = {text for sample, text in answers if sample.is_right(cfg.right)}
    right |= {flat(answer) for answer in question.reference_answers}
    # Equal images share one call of the generator, so they count as one answer.
    answer_by_images = {
        clues[sample.ref].asked_from: text
        for sample, text in answers
        if clues[sample.ref].is_sent and sample.judge is not None
    }
    seen = list(answer_by_images.values())
    agreed = None
    if len(seen) >= cfg.agree_least and not is_confirmed:
        text, count = max(Counter(seen).items(), key=lambda item: (item[1], item[0]))
        agreed = text if count / len(seen) >= cfg.agree_share else None
    unread = {text for sample, text in answers if not clues[sample.ref].is_sent}
    reproduced = any(clues[sample.ref].is_sent and text in right for sample, text in answers)
    if agreed is None or agreed in unread or reproduced or not _is_reading(agreed, question):
        agreed = None
    return Suspicion(frozenset(right - {""}), agreed)


def _is_reading(answer: str, question: Question) -> bool:
    """Return whether an answer may be read from a page.

    It has words that the question does not have, and is no refusal. If answer and reference both
    have numbers and units, they share a unit.
    """
    words = set(answer.split())
    if words <= set(parts_of(question.question)) or _REFUSAL.search(answer):
        return False
    reference = set(parts_of(question.reference_text))
    units = [{word for word in tokens if not _has_digit(word)} for tokens in (words, reference)]
    both_numbers = all(any(map(_has_digit, tokens)) for tokens in (words, reference))
    return not (both_numbers and all(units) and units[0].isdisjoint(units[1]))


def _has_digit(word: str) -> bool:
    return any(letter.isdigit() for letter in word)


def cause_of(
    sample: EpisodeSummary,
    clue: EpisodeEvidence,
    question: Question,
    suspects: Suspicion,
    cfg: DiagnoseConfig,
) -> Cause:
    """Return the cause of a failed episode; `right` for a good one.

    clue: what the episode has seen.
    suspects: what the answers to its question say against judge and reference.
    """
    if sample.end == "declined":
        return "gave_up"
    if sample.value(cfg.measure) is None:
        return "unscored"
    if sample.judge >= cfg.right if sample.judge is not None else clue.has_all_gold:
        return "right"
    if not carriers(question):
        return "no_gold"
    if clue.has_all_gold:
        return _answer_cause(clue, suspects) if clue.is_sent else "not_sent"
    return _search_cause(sample, clue, cfg)


def _answer_cause(clue: EpisodeEvidence, suspects: Suspicion) -> Cause:
    answer = flat(clue.answer or "")
    if answer in suspects.right:
        return "judge_suspected"
    return "reference_suspected" if answer and answer == suspects.agreed else "generator_failed"


def _search_cause(sample: EpisodeSummary, clue: EpisodeEvidence, cfg: DiagnoseConfig) -> Cause:
    if sample.turns and sample.invalid / sample.turns >= cfg.invalid_share:
        return "invalid"
    if sample.end == "complete" and sample.searches <= cfg.early_searches:
        return "ended_early"
    if clue.hit:
        return "not_shown"
    if clue.document:
        return "wrong_page"
    return "forced" if sample.end in ("forced", "context") else "never_hit"


def in_scope(prompt: CuratedPrompt, cfg: DiagnoseConfig) -> list[EpisodeSummary]:
    """Return the episodes to diagnose: those that count by `combine`, and those without a value.

    All episodes if none has a value.
    """
    counted = prompt.counted_episodes(cfg.combine, cfg.measure)
    if cfg.combine == "all" or not counted:
        return prompt.samples
    return of_same_part(prompt.samples, counted[-1], cfg.combine)


def main_cause(causes: Counter[Cause]) -> Cause:
    """Return the most frequent cause; of equal ones the first rule.

    Unspecific causes count only if there is no other; without an episode it is `unscored`.
    """
    specific = [cause for cause in CAUSES if causes[cause] and cause not in _UNSPECIFIC]
    if not specific:
        return "right" if causes["right"] else "unscored"
    return max(specific, key=lambda cause: causes[cause])


class Diagnose(Step[DiagnoseConfig]):
    """Find out why prompts score low: a wrong search, answer or judgement, or an early end."""

    name = "diagnose"
    title = "Diagnosis"
    config = DiagnoseConfig
    options = ("run", "out", "record", "config", "set_", "overwrite")
    moves = ("record",)
    records = True

    def note(
        self, trajectory: Trajectory, sample: EpisodeSummary, settings: DiagnoseConfig
    ) -> EpisodeEvidence:
        """Return the evidence of an episode."""
        return episode_evidence(trajectory)

    def decide_one(
        self, prompt: CuratedPrompt, work: Work[DiagnoseConfig], answer: Any
    ) -> Decision:
        """Return the decision about a prompt, which is kept if it has a low score, or none.

        A reference that `verify` confirmed is not suspected again.
        """
        cfg, clues = work.settings, work.notes
        verified = work.prior.record.question(prompt.question.id, VERIFY)
        is_confirmed = verified is not None and verified.verdict == "keep"
        samples, mean = in_scope(prompt, cfg), prompt.mean(cfg.combine, cfg.measure)
        suspects = suspicion(prompt.question, samples, clues, cfg, is_confirmed)
        cause_by_ref = {
            sample.ref: cause_of(sample, clues[sample.ref], prompt.question, suspects, cfg)
            for sample in samples
        }
        causes = Counter(cause_by_ref.values())
        corners = Counter(corner_of(sample, cfg) for sample in samples)
        failed = [ref for ref, cause in cause_by_ref.items() if cause not in ("right", "unscored")]
        is_low = mean is None or below(mean, cfg.low)
        reason = main_cause(causes) if is_low else NOT_LOW
        stats = {
            "mean": mean,
            "causes": {name: causes[name] for name in CAUSES if causes[name]},
            "corners": {name: corners[name] for name in CORNERS if corners[name]},
            "forced": sum(sample.end in ("forced", "context") for sample in samples),
            "malformed": sum(sample.invalid > 0 for sample in samples),
            "best_rank": min((s.rank for s in samples if s.rank is not None), default=None),
            "agreed": suspects.agreed if reason == "reference_suspected" else None,
            "document": prompt.question.file_name,
            "question_type": prompt.question.question_type,
        }
        episodes = failed if is_low and failed else list(cause_by_ref)
        row = question_row(prompt.question, cause=reason) if is_low else None
        return Decision(prompt.question.id, is_low, reason, stats, episodes, row)

    def decide(self, work: Work[DiagnoseConfig], answers: Mapping[str, Any]) -> Outcome:
        """Return all prompts; those with a low score, or without one, have a cause."""
        outcome = super().decide(work, answers)
        outcome.extra = {
            "causes": _sum_up(outcome.decisions, "causes"),
            "corners": _sum_up(outcome.decisions, "corners"),
        }
        return outcome

    def entries(self, row: Mapping[str, Any]) -> Iterator[RecordEntry]:
        """Yield an entry for a row with a cause: a doubt if its reference is suspected."""
        if row["kept"]:
            verdict: Verdict = "doubt" if row["reason"] == "reference_suspected" else "keep"
            yield RecordEntry(str(row["id"]), self.name, verdict, str(row["reason"]))

    def sections(self, work: Work[DiagnoseConfig], outcome: Outcome) -> list[Section]:
        """Return causes, documents, and NDCG against judge with examples."""
        cfg = work.settings
        low: Counter[str] = Counter()
        by_document: dict[str, Counter[str]] = defaultdict(Counter)
        for decision in outcome.decisions:
            if decision.is_kept:
                low[decision.reason] += 1
                by_document[str(decision.stats["document"])][decision.reason] += 1
        words = (
            f"{low.total()} of {len(outcome.decisions)} prompts have a mean {cfg.measure} below "
            f"{cfg.low:g}, or none. An episode has the first cause of these that applies; a prompt "
            "the one that most of its failed episodes have."
        )
        episodes: Mapping[str, int] = outcome.extra["causes"]
        causes = [
            [name, low[name], episodes.get(name, 0), meaning] for name, meaning in CAUSES.items()
        ]
        return [
            Section("Why prompts score low", [words], ["cause", "prompts", "episodes", ""], causes),
            *([Section("By document", [], *_documents(by_document))] if low else []),
            *_corner_sections(work),
        ]


def corner_of(sample: EpisodeSummary, cfg: DiagnoseConfig) -> Corner | None:
    """Return the corner of NDCG against judge; None if one of the two is missing."""
    if sample.judge is None or sample.ndcg is None:
        return None
    right = sample.judge >= cfg.right
    if sample.ndcg > cfg.found:
        return "found_right" if right else "found_wrong"
    return "missed_right" if right else "missed_wrong"


def _sum_up(decisions: Iterable[Decision], name: str) -> dict[str, int]:
    """Return the counts of episodes over all prompts."""
    total: Counter[str] = Counter()
    for decision in decisions:
        total.update(decision.stats[name])
    return {key: total[key] for key in (CAUSES if name == "causes" else CORNERS) if total[key]}


def _documents(counts_by_document: Mapping[str, Counter[str]]) -> tuple[list[str], list[list[Any]]]:
    present = [
        name for name in CAUSES if any(counts[name] for counts in counts_by_document.values())
    ]
    rows = [
        [name or "–", counts.total(), *(counts[cause] for cause in present)]
        for name, counts in sorted(
            counts_by_document.items(), key=lambda item: (-item[1].total(), item[0])
        )
    ]
    return ["document", "prompts", *present], rows[:_DOCUMENTS]


def _corner_sections(work: Work[DiagnoseConfig]) -> list[Section]:
    from scorekit.report.page import chart_image

    cfg, clues = work.settings, work.notes
    episodes: Counter[Corner] = Counter()
    prompt_ids: dict[Corner, set[str]] = {name: set() for name in CORNERS}
    examples: dict[Corner, list[list[Any]]] = {name: [] for name in CORNERS}
    points: Counter[tuple[float | None, float | None]] = Counter()
    for prompt in work.prompts:
        for sample in in_scope(prompt, cfg):
            corner = corner_of(sample, cfg)
            if corner is None:
                continue
            episodes[corner] += 1
            prompt_ids[corner].add(prompt.question.id)
            points[sample.ndcg, sample.judge] += 1
            if len(examples[corner]) < cfg.examples:
                question, answer = prompt.question, clues[sample.ref].answer
                words = [question.question, question.reference_text, answer]
                examples[corner].append([*words, sample.ndcg, sample.judge, sample.ref])
    chart = chart_image("episodes", "NDCG", partial(_scatter, points, cfg))
    note = (
        f"Episodes that have both. Found: NDCG above {cfg.found:g}. Right: judge from "
        f"{cfg.right:g} on."
    )
    counts = [
        [name, episodes[name], len(prompt_ids[name]), meaning] for name, meaning in CORNERS.items()
    ]
    head = ["corner", "episodes", "prompts", ""]
    sections = [Section("NDCG against judge", [note], head, counts, [chart])]
    head = ["question", "reference", "answer", "NDCG", "judge", "episode"]
    for name, meaning in CORNERS.items():
        sections.append(Section(f"{name}: {meaning}", [], head, examples[name]))
    return [section for section in sections if section.rows or section.images]


def _scatter(points: Mapping[tuple[Any, Any], int], cfg: DiagnoseConfig, axes: Any) -> int:
    if not points:
        return 0
    max_count = max(points.values())
    coordinates = sorted(points)
    sizes = [12 + 188 * points[point] / max_count for point in coordinates]
    axes.scatter(*zip(*coordinates, strict=True), s=sizes, color="C0", alpha=0.6)
    for point in coordinates:
        if points[point] > 1:
            axes.annotate(str(points[point]), point, fontsize=6, ha="center", va="center")
    axes.axhline(cfg.right, color="C3", linewidth=1)
    axes.axvline(cfg.found, color="C3", linewidth=1)
    axes.set(xlim=(-0.08, 1.08), ylim=(-0.12, 1.12), ylabel="judge")
    return 1
