"""Why an episode failed, and why a prompt scores low: rules in an order, the first that applies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainer.search.curation.samples import CuratedPrompt, Sample, carriers
from trainer.search.curation.spool import Spool
from trainer.search.curation.truth.answers import flat, parts_of
from trainer.search.curation.truth.config import DiagnoseConfig
from trainer.search.records import Question, Trajectory

Cause = Literal[
    "right",
    "gave_up",
    "unscored",
    "no_gold",
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
#: In the order in which they are looked at; so told on the page and in docs/curation.md.
CAUSES: Final[Mapping[Cause, str]] = {
    "right": "the answer was judged right; without a judge: the facts were shown",
    "gave_up": "the policy gave the search up",
    "unscored": "it has no score: a neighbour failed, or nobody was asked",
    "no_gold": "the question names no gold page: what was searched wrong is not known",
    "judge_suspected": "the facts were shown, and the answer, judged wrong, is the reference in "
    "the same words, or one that was judged right in another episode",
    "reference_suspected": "the facts were shown, and the answer is the one on which the answers "
    "agree, and which is not the reference's",
    "generator_failed": "the facts were shown, and the answer is wrong all the same",
    "invalid": "malformed turns took too many of its turns",
    "ended_early": "the policy ended by itself after too few searches",
    "not_shown": "a page with a missing fact stood among the hits, and was not shown",
    "wrong_page": "a page of the right document was shown, and not all facts",
    "forced": "its turns or its context were used up before the right document was found",
    "never_hit": "no page with a missing fact was among the hits of any search",
}
#: Ways to say that there is no answer, as `flat` shows them.
_REFUSAL: Final = re.compile(
    r"\b(?:not|cannot|can t|unable|unknown|no (?:information|data|answer)|n a|unclear"
    r"|insufficient)\b"
    r"|알 수 없|없습니다|없다|없음|않습니다|않는다|않음|못"
)
#: Causes that say nothing of why: they count where there is no other.
_MUTE: Final = ("right", "unscored")


@dataclass(frozen=True, slots=True)
class Clue:
    """What a sample does not say of its episode.

    said: the answer. asked_from: the pictures that it was given from. whole: whether
    of every gold page it, or an alternative to it, was shown. hit: whether, of one of those that
    were not, a search had such a page among its hits. document: whether a page of a gold page's
    document was shown.
    """

    said: str | None
    asked_from: str
    whole: bool
    hit: bool
    document: bool


def clue_of(trajectory: Trajectory) -> Clue:
    """Of an episode, while it is in memory."""
    asked, shown, answer = trajectory.question, set(trajectory.shown_pages), trajectory.answer
    facts = [{gold, *asked.alternatives.get(gold, ())} for gold in asked.gold]
    missing = {page for fact in facts if fact.isdisjoint(shown) for page in fact}
    hits = {hit.page_id for turn in trajectory.turns for hit in turn.hits}
    documents = {gold.rpartition("_")[0] for gold in asked.gold}
    pictures = ",".join(answer.evidence) if answer is not None else ""
    return Clue(
        said=answer.text if answer is not None else None,
        asked_from=pictures or trajectory.trajectory_id,
        whole=bool(shown) and not missing,
        hit=not missing.isdisjoint(hits),
        document=any(page.rpartition("_")[0] in documents for page in shown),
    )


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What the answers to one question say about judge and reference, as flat texts.

    right: answers that were judged right, and the reference. agreed: the one on which the answers
    agree that were given with all facts in sight, and that speaks against the reference; None where
    they do not, where an answer with the facts in sight was judged right, where the same is said
    without them, and where it is no reading of a page (`_is_reading`).
    """

    right: frozenset[str]
    agreed: str | None


def suspicion(
    question: Question,
    samples: Sequence[Sample],
    clues: Spool[Clue],
    cfg: DiagnoseConfig,
    confirmed: bool = False,
) -> Suspicion:
    """Compare a prompt's answers with one another and with the reference. confirmed: whether
    `verify` has found the reference right, so that no agreement speaks against it."""
    said = [(one, flat(text)) for one in samples if (text := clues[one.ref].said) is not None]
    right = {text for one, text in said if one.judge is not None and one.judge >= cfg.right}
    right |= {flat(question.reference_answer)}
    # Of equal pictures the generator was asked once: that is one answer, however many episodes.
    once = {
        clues[one.ref].asked_from: text
        for one, text in said
        if clues[one.ref].whole and one.judge is not None
    }
    seen = list(once.values())
    agreed = None
    if len(seen) >= cfg.agree_least and not confirmed:
        text, count = max(Counter(seen).items(), key=lambda of: (of[1], of[0]))
        agreed = text if count / len(seen) >= cfg.agree_share else None
    unread = {text for one, text in said if not clues[one.ref].whole}
    reproduced = any(clues[one.ref].whole and text in right for one, text in said)
    if agreed is None or agreed in unread or reproduced or not _is_reading(agreed, question):
        agreed = None
    return Suspicion(frozenset(right - {""}), agreed)


def _is_reading(answer: str, question: Question) -> bool:
    """Whether an answer may be read on a page, against the reference: it says more than the
    question does, it is no refusal, and where both have numbers, it has a unit in common with the
    reference, or one of them has none."""
    words = set(answer.split())
    if words <= set(parts_of(question.question)) or _REFUSAL.search(answer):
        return False
    reference = set(parts_of(question.reference_answer))
    units = [{word for word in of if not _has_digit(word)} for of in (words, reference)]
    both_numbers = all(any(map(_has_digit, of)) for of in (words, reference))
    return not (both_numbers and all(units) and units[0].isdisjoint(units[1]))


def _has_digit(word: str) -> bool:
    return any(letter.isdigit() for letter in word)


def cause_of(
    sample: Sample, clue: Clue, question: Question, suspects: Suspicion, cfg: DiagnoseConfig
) -> Cause:
    """Why an episode failed; `right` where it did not."""
    if sample.end == "declined":
        return "gave_up"
    if sample.value(cfg.measure) is None:
        return "unscored"
    if sample.judge >= cfg.right if sample.judge is not None else clue.whole:
        return "right"
    if not carriers(question):
        return "no_gold"
    if clue.whole:
        return _of_answer(clue, suspects)
    return _of_search(sample, clue, cfg)


def _of_answer(clue: Clue, suspects: Suspicion) -> Cause:
    said = flat(clue.said or "")
    if said in suspects.right:
        return "judge_suspected"
    return "reference_suspected" if said and said == suspects.agreed else "generator_failed"


def _of_search(sample: Sample, clue: Clue, cfg: DiagnoseConfig) -> Cause:
    if sample.turns and sample.invalid / sample.turns >= cfg.invalid_share:
        return "invalid"
    if sample.end == "complete" and sample.searches <= cfg.early_searches:
        return "ended_early"
    if clue.hit:
        return "not_shown"
    if clue.document:
        return "wrong_page"
    return "forced" if sample.end in ("forced", "context") else "never_hit"


def in_scope(prompt: CuratedPrompt, cfg: DiagnoseConfig) -> list[Sample]:
    """The episodes that are looked into: those that count by `combine`, and those beside them that
    have no value; all where none has."""
    counted = prompt.counted(cfg.combine, cfg.measure)
    if cfg.combine == "all" or not counted:
        return prompt.samples
    last = counted[-1]
    if cfg.combine == "last_run":
        return [one for one in prompt.samples if one.order == last.order]
    where = (last.order, last.step)
    return [one for one in prompt.samples if (one.order, one.step) == where]


def main_cause(causes: Counter[Cause]) -> Cause:
    """The most frequent; of equals the one that is looked at first. Of those that say nothing of
    why only where there is no other; `unscored` without any episode."""
    order = list(CAUSES)
    telling = [cause for cause in causes if cause not in _MUTE]
    if not telling:
        return "right" if causes["right"] else "unscored"
    return min(telling, key=lambda cause: (-causes[cause], order.index(cause)))
