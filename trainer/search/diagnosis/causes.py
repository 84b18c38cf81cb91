"""Find the cause of a failed episode and of a low score, by the first rule that applies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainer.search.curation.config_sections import DiagnoseConfig
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.samples import (
    CuratedPrompt,
    EpisodeSummary,
    carriers,
    has_all_evidence,
    of_same_part,
)
from trainer.search.data import documents
from trainer.search.diagnosis.answers import flat, parts_of
from trainer.search.records import Question, Trajectory

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
#: The causes in the order of the rules, as on the page and in docs/explanation/curation.md.
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

    answer: the answer. asked_from: key of the images of the request. has_all_gold: whether each
    gold page, or an alternative, was visible. is_sent: whether the generator got each of these.
    hit: whether a missing one was among the hits of a search. document: whether a page of a gold
    page's document was visible.
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

    right: answers that were judged right, and the reference. agreed: the common answer of episodes
    with all facts sent, if it contradicts the reference. None if they do not agree, if an answer
    with all facts was judged right, if an answer without them is equal, and if it cannot be read
    from a page (`_is_reading`).
    """

    right: frozenset[str]
    agreed: str | None


def suspicion(
    question: Question,
    samples: Sequence[EpisodeSummary],
    clues: DiskSpool[EpisodeEvidence],
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
    """Return the cause of a failed episode; `right` for a good one."""
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
    counted = prompt.counted(cfg.combine, cfg.measure)
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
