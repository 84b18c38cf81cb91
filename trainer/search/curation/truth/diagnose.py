"""`search diagnose`: why prompts score low, each with the episodes behind it, and in all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from scorekit.numeric.thresholds import below
from scorekit.report.page import picture
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import Curated, Decision, question_row
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, Sample
from trainer.search.curation.spool import Spool
from trainer.search.curation.truth.causes import (
    CAUSES,
    Clue,
    cause_of,
    in_scope,
    main_cause,
    suspicion,
)
from trainer.search.curation.truth.config import DiagnoseConfig
from trainer.sft.curation_record import VERIFY, CurationRecord

Corner = Literal["found_right", "found_wrong", "missed_right", "missed_wrong"]
CORNERS: Final[Mapping[Corner, str]] = {
    "found_right": "gold found, answer right",
    "found_wrong": "gold found, answer wrong: generator, judge or reference",
    "missed_right": "gold not found, answer right: `hallucinations` says how",
    "missed_wrong": "gold not found, answer wrong: searched wrong",
}
NOT_LOW = "not_low"
_DOCUMENTS = 60  # in a table


def corner_of(sample: Sample, cfg: DiagnoseConfig) -> Corner | None:
    """NDCG against judge; None where one of the two was not had."""
    if sample.judge is None or sample.ndcg is None:
        return None
    right = sample.judge >= cfg.right
    if sample.ndcg > cfg.found:
        return "found_right" if right else "found_wrong"
    return "missed_right" if right else "missed_wrong"


def make_diagnosis(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    clues: Spool[Clue],
    record: CurationRecord | None = None,
) -> Curated:
    """All prompts of the data: those that score low, or were never scored, with their cause.

    clues: of every episode, under its `Sample.ref`. record: what was decided before: a reference
    that `verify` has confirmed is not suspected again.
    """
    made = Curated("diagnose", cfg.diagnose, read, record=record or CurationRecord())
    for prompt in prompts:
        verified = made.record.question(prompt.question.id, VERIFY) if made.record else None
        confirmed = verified is not None and verified.verdict == "keep"
        decision = _decided(prompt, clues, cfg.diagnose, confirmed)
        made.decisions.append(decision)
        if decision.kept:
            made.rows.append(question_row(prompt.question, cause=decision.reason))
    made.told = {
        "causes": _summed(made.decisions, "causes"),
        "corners": _summed(made.decisions, "corners"),
    }
    return made


def _decided(
    prompt: CuratedPrompt, clues: Spool[Clue], cfg: DiagnoseConfig, confirmed: bool
) -> Decision:
    samples, mean = in_scope(prompt, cfg), prompt.mean(cfg.combine, cfg.measure)
    suspects = suspicion(prompt.question, samples, clues, cfg, confirmed)
    of = {one.ref: cause_of(one, clues[one.ref], prompt.question, suspects, cfg) for one in samples}
    causes, corners = Counter(of.values()), Counter(corner_of(one, cfg) for one in samples)
    failed = [ref for ref, cause in of.items() if cause not in ("right", "unscored")]
    low = mean is None or below(mean, cfg.low)
    reason = main_cause(causes) if low else NOT_LOW
    figures = {
        "mean": mean,
        "causes": {name: causes[name] for name in CAUSES if causes[name]},
        "corners": {name: corners[name] for name in CORNERS if corners[name]},
        "forced": sum(one.end in ("forced", "context") for one in samples),
        "malformed": sum(one.invalid > 0 for one in samples),
        "best_rank": min((one.rank for one in samples if one.rank is not None), default=None),
        "agreed": suspects.agreed if reason == "reference_suspected" else None,
        "document": prompt.question.file_name,
        "question_type": prompt.question.question_type,
    }
    return Decision(
        prompt.question.id, low, reason, figures, failed if low and failed else list(of)
    )


def _summed(decisions: Iterable[Decision], name: str) -> dict[str, int]:
    """Episodes of all prompts."""
    total: Counter[str] = Counter()
    for one in decisions:
        total.update(one.figures[name])
    return {of: total[of] for of in (CAUSES if name == "causes" else CORNERS) if total[of]}


# -- the page -------------------------------------------------------------------------------------


def diagnosis_page(made: Curated, prompts: Mapping[str, CuratedPrompt], clues: Spool[Clue]) -> str:
    """report.html: causes, each document, and NDCG against judge with examples."""
    cfg = made.settings
    assert isinstance(cfg, DiagnoseConfig)
    low: Counter[str] = Counter()
    by_document: dict[str, Counter[str]] = defaultdict(Counter)
    for one in made.decisions:
        if one.kept:
            low[one.reason] += 1
            by_document[str(one.figures["document"])][one.reason] += 1
    words = (
        f"{low.total()} of {len(made.decisions)} prompts have a mean {cfg.measure} below "
        f"{cfg.low:g}, or none. An episode has the first cause of these that applies; a prompt "
        "the one that most of its failed episodes have."
    )
    episodes: Mapping[str, int] = made.told["causes"]
    causes = [[name, low[name], episodes.get(name, 0), meaning] for name, meaning in CAUSES.items()]
    sections = [
        Section("Why prompts score low", [words], ["cause", "prompts", "episodes", ""], causes),
        *([Section("By document", [], *_documents(by_document))] if low else []),
        *_corners(made, prompts, clues, cfg),
    ]
    return curation_page(made, "Diagnosis", sections, prompts)


def _documents(by: Mapping[str, Counter[str]]) -> tuple[list[str], list[list[Any]]]:
    there = [name for name in CAUSES if any(found[name] for found in by.values())]
    rows = [
        [name or "–", found.total(), *(found[cause] for cause in there)]
        for name, found in sorted(by.items(), key=lambda of: (-of[1].total(), of[0]))
    ]
    return ["document", "prompts", *there], rows[:_DOCUMENTS]


def _corners(
    made: Curated,
    prompts: Mapping[str, CuratedPrompt],
    clues: Spool[Clue],
    cfg: DiagnoseConfig,
) -> list[Section]:
    episodes: Counter[Corner] = Counter()
    asked: dict[Corner, set[str]] = {name: set() for name in CORNERS}
    examples: dict[Corner, list[list[Any]]] = {name: [] for name in CORNERS}
    points: Counter[tuple[float | None, float | None]] = Counter()
    for id, prompt in prompts.items():
        for one in in_scope(prompt, cfg):
            corner = corner_of(one, cfg)
            if corner is None:
                continue
            episodes[corner] += 1
            asked[corner].add(id)
            points[one.ndcg, one.judge] += 1
            if len(examples[corner]) < cfg.examples:
                question, said = prompt.question, clues[one.ref].said
                words = [question.question, question.reference_answer, said]
                examples[corner].append([*words, one.ndcg, one.judge, one.ref])
    drawn = picture("episodes", "NDCG", partial(_scatter, points, cfg))
    told = (
        f"Episodes that have both. Found: NDCG above {cfg.found:g}. Right: judge from "
        f"{cfg.right:g} on."
    )
    counts = [
        [name, episodes[name], len(asked[name]), meaning] for name, meaning in CORNERS.items()
    ]
    head = ["corner", "episodes", "prompts", ""]
    sections = [Section("NDCG against judge", [told], head, counts, [drawn])]
    head = ["question", "reference", "answer", "NDCG", "judge", "episode"]
    for name, meaning in CORNERS.items():
        sections.append(Section(f"{name}: {meaning}", [], head, examples[name]))
    return [one for one in sections if one.rows or one.pictures]


def _scatter(points: Mapping[tuple[Any, Any], int], cfg: DiagnoseConfig, axes: Any) -> int:
    if not points:
        return 0
    most = max(points.values())
    at = sorted(points)
    sizes = [12 + 188 * points[one] / most for one in at]
    axes.scatter([x for x, _ in at], [y for _, y in at], s=sizes, color="C0", alpha=0.6)
    for one in at:
        if points[one] > 1:
            axes.annotate(str(points[one]), one, fontsize=6, ha="center", va="center")
    axes.axhline(cfg.right, color="C3", linewidth=1)
    axes.axvline(cfg.found, color="C3", linewidth=1)
    axes.set(xlim=(-0.08, 1.08), ylim=(-0.12, 1.12), ylabel="judge")
    return 1
