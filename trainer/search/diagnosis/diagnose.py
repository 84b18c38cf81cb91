"""The command `search diagnose`: find out why prompts score low, with their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from scorekit.numeric.thresholds import below
from scorekit.report.page import chart_image
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import DiagnoseConfig
from trainer.search.curation.dataset import CurationResult, Decision, question_row
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, EpisodeSummary
from trainer.search.diagnosis.causes import (
    CAUSES,
    EpisodeEvidence,
    cause_of,
    in_scope,
    main_cause,
    suspicion,
)
from trainer.sft.curation_record import VERIFY

Corner = Literal["found_right", "found_wrong", "missed_right", "missed_wrong"]
CORNERS: Final[Mapping[Corner, str]] = {
    "found_right": "gold found, answer right",
    "found_wrong": "gold found, answer wrong: not sent, or generator, judge or reference",
    "missed_right": "gold not found, answer right: `hallucinations` says how",
    "missed_wrong": "gold not found, answer wrong: searched wrong",
}
NOT_LOW = "not_low"
_DOCUMENTS = 60  # max rows of the table


def corner_of(sample: EpisodeSummary, cfg: DiagnoseConfig) -> Corner | None:
    """Return the corner of NDCG against judge; None if one of the two is missing."""
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
    clues: DiskSpool[EpisodeEvidence],
    decided: PriorDecisions,
) -> CurationResult:
    """Return all prompts; those with a low score, or without one, have a cause.

    clues: of every episode, by its `EpisodeSummary.ref`. decided: a reference that `verify`
    confirmed is not suspected again.
    """
    result = CurationResult("diagnose", cfg.diagnose, read, decided.inputs, record=decided.record)
    for prompt in prompts:
        verified = decided.record.question(prompt.question.id, VERIFY)
        is_confirmed = verified is not None and verified.verdict == "keep"
        decision = _decide(prompt, clues, cfg.diagnose, is_confirmed)
        result.decisions.append(decision)
        if decision.is_kept:
            result.rows.append(question_row(prompt.question, cause=decision.reason))
    result.manifest_extra = {
        "causes": _summed(result.decisions, "causes"),
        "corners": _summed(result.decisions, "corners"),
    }
    return result


def _decide(
    prompt: CuratedPrompt,
    clues: DiskSpool[EpisodeEvidence],
    cfg: DiagnoseConfig,
    is_confirmed: bool,
) -> Decision:
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
    return Decision(prompt.question.id, is_low, reason, stats, episodes)


def _summed(decisions: Iterable[Decision], name: str) -> dict[str, int]:
    """Return the counts of episodes over all prompts."""
    total: Counter[str] = Counter()
    for decision in decisions:
        total.update(decision.stats[name])
    return {key: total[key] for key in (CAUSES if name == "causes" else CORNERS) if total[key]}


def diagnosis_page(
    result: CurationResult, prompts: Mapping[str, CuratedPrompt], clues: DiskSpool[EpisodeEvidence]
) -> str:
    """Return report.html: causes, documents, and NDCG against judge with examples."""
    cfg = result.settings
    assert isinstance(cfg, DiagnoseConfig)
    low: Counter[str] = Counter()
    by_document: dict[str, Counter[str]] = defaultdict(Counter)
    for decision in result.decisions:
        if decision.is_kept:
            low[decision.reason] += 1
            by_document[str(decision.stats["document"])][decision.reason] += 1
    words = (
        f"{low.total()} of {len(result.decisions)} prompts have a mean {cfg.measure} below "
        f"{cfg.low:g}, or none. An episode has the first cause of these that applies; a prompt "
        "the one that most of its failed episodes have."
    )
    episodes: Mapping[str, int] = result.manifest_extra["causes"]
    causes = [[name, low[name], episodes.get(name, 0), meaning] for name, meaning in CAUSES.items()]
    sections = [
        Section("Why prompts score low", [words], ["cause", "prompts", "episodes", ""], causes),
        *([Section("By document", [], *_documents(by_document))] if low else []),
        *_corner_sections(result, prompts, clues, cfg),
    ]
    return curation_page(result, "Diagnosis", sections, prompts)


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


def _corner_sections(
    result: CurationResult,
    prompts: Mapping[str, CuratedPrompt],
    clues: DiskSpool[EpisodeEvidence],
    cfg: DiagnoseConfig,
) -> list[Section]:
    episodes: Counter[Corner] = Counter()
    prompt_ids: dict[Corner, set[str]] = {name: set() for name in CORNERS}
    examples: dict[Corner, list[list[Any]]] = {name: [] for name in CORNERS}
    points: Counter[tuple[float | None, float | None]] = Counter()
    for id, prompt in prompts.items():
        for sample in in_scope(prompt, cfg):
            corner = corner_of(sample, cfg)
            if corner is None:
                continue
            episodes[corner] += 1
            prompt_ids[corner].add(id)
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
