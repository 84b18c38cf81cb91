"""Choose the prompts with rare successes and their best episodes, by stats only."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scorekit.numeric.thresholds import above
from trainer.search.curation.config_sections import DistillConfig, Rank
from trainer.search.curation.dataset import Decision, refs
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.samples import CuratedPrompt, EpisodeSummary, has_all_evidence
from trainer.search.distillation.targets import RejectionReason, repeated, target_error
from trainer.search.records import Trajectory
from trainer.sft.curation_record import CurationRecord


@dataclass(frozen=True, slots=True)
class EpisodeText:
    """Data about the text of an episode.

    rejection: why it is not an example. repeats: whether a query repeats the one before. length: in
    letters. evidence: whether the answer rests on pages with the facts. digest: of the question and
    the turns, equal for duplicates.
    """

    rejection: RejectionReason | None
    repeats: bool
    length: int
    evidence: bool
    digest: str


def add_text(spool: DiskSpool[EpisodeText], trajectory: Trajectory, sample: EpisodeSummary) -> None:
    """Add data about an episode with a judge's score above 0, by its `EpisodeSummary.ref`."""
    if sample.judge:
        texts = [turn.text for turn in trajectory.turns if not turn.forced]
        written = EpisodeText(
            rejection=target_error(trajectory),
            repeats=bool(repeated(trajectory)),
            length=sum(map(len, texts)),
            evidence=has_all_evidence(trajectory),
            digest=_digest([trajectory.question.question, *texts]),
        )
        spool.append(written, sample.ref)


def _digest(texts: Sequence[str]) -> str:
    """Return the SHA-256 of texts without their blanks."""
    return hashlib.sha256(
        json.dumps(["".join(text.split()) for text in texts]).encode()
    ).hexdigest()


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The choice for a prompt. eligible: the episodes that may be rows, the best first. rate: share
    of right episodes among those with a score; None without one."""

    rate: float | None
    eligible: list[EpisodeSummary]
    decisions: list[Decision]


def choose(
    prompt: CuratedPrompt,
    written_by_ref: DiskSpool[EpisodeText],
    cfg: DistillConfig,
    record: CurationRecord,
) -> PromptChoice:
    """Return the choice for a prompt.

    A rejected prompt has one decision for all episodes, a chosen one has a decision for each
    episode that is not eligible. record: earlier decisions about prompts and episodes.
    """
    counted, rate, right = _rate(prompt, cfg)
    stats = {"question_id": prompt.question.id, "rate": rate, "right": right}
    reason = record.no_example(prompt.question.id, None) if right else None
    if reason := reason or _not_taken(prompt, rate, right, cfg):
        decision = Decision(prompt.question.id, False, reason, stats, refs(prompt))
        return PromptChoice(rate, [], [decision])
    counts = {sample.ref for sample in counted}
    eligible, decisions = [], []
    for sample in prompt.samples:
        written = written_by_ref.get(sample.ref)
        reason = _no_row(sample, sample.ref in counts, written, cfg)
        reason = reason or _no_evidence(prompt, sample, written, cfg, record)
        if reason:
            decisions.append(decided(sample, prompt, rate, False, reason))
        else:
            eligible.append(sample)
    eligible.sort(key=lambda sample: _key(sample, written_by_ref[sample.ref], cfg.order))
    return PromptChoice(rate, eligible, decisions)


def decided(
    sample: EpisodeSummary,
    prompt: CuratedPrompt,
    rate: float | None,
    is_kept: bool,
    reason: str,
    **more: str,
) -> Decision:
    """Return the decision about an episode. more: further values."""
    stats = {
        "question_id": prompt.question.id,
        "rate": rate,
        "judge": sample.judge,
        "ndcg": sample.ndcg,
        "searches": sample.searches,
        "turns": sample.turns,
        "end": sample.end,
        **more,
    }
    return Decision(sample.ref, is_kept, reason, stats, [sample.ref])


def succeeds_rarely(prompt: CuratedPrompt, cfg: DistillConfig) -> bool:
    """Return whether a prompt has right episodes, but few enough of them."""
    _, rate, right = _rate(prompt, cfg)
    return _not_taken(prompt, rate, right, cfg) is None


def _rate(
    prompt: CuratedPrompt, cfg: DistillConfig
) -> tuple[list[EpisodeSummary], float | None, int]:
    """Return (episodes that count, share of right ones, number of right ones)."""
    counted = prompt.counted(cfg.combine, "judge")
    right = sum(sample.is_right(cfg.success) for sample in counted)
    return counted, right / len(counted) if counted else None, right


def _not_taken(
    prompt: CuratedPrompt, rate: float | None, right: int, cfg: DistillConfig
) -> str | None:
    """Return why a prompt is rejected, or None."""
    if rate is None and not prompt.samples:
        return "no episode"
    if rate is None:
        return "none is judged"
    if not right:
        return "none is right"
    if above(rate, cfg.rate_at_most):
        return f"more than {cfg.rate_at_most:g} of them are right"
    if cfg.successes_at_most is not None and right > cfg.successes_at_most:
        return f"more than {cfg.successes_at_most} of them are right"
    return None


def _no_row(
    sample: EpisodeSummary, counts: bool, written: EpisodeText | None, cfg: DistillConfig
) -> str | None:
    """Return why an episode is not eligible by its own values, or None."""
    if sample.judge is None:
        return "not judged"
    if not counts:
        return "of another step or run than those that count"
    if written is None or not sample.is_right(cfg.success):
        return "not right"
    if sample.end == "failed" or (cfg.ended == "complete" and sample.end != "complete"):
        return f"ended as {sample.end}"
    if cfg.ndcg_above is not None and (
        sample.ndcg is None or not above(sample.ndcg, cfg.ndcg_above)
    ):
        return "no NDCG" if sample.ndcg is None else f"an NDCG of {cfg.ndcg_above:g} at most"
    if cfg.invalid == "drop" and sample.invalid:
        return "an invalid turn"
    if cfg.repeats == "drop" and written.repeats:
        return "a query repeated"
    return written.rejection


def _no_evidence(
    prompt: CuratedPrompt,
    sample: EpisodeSummary,
    written: EpisodeText | None,
    cfg: DistillConfig,
    record: CurationRecord,
) -> str | None:
    """Return why a right answer has no evidence, or None if it has."""
    if dropped_by := record.no_example(prompt.question.id, sample.ref):
        return dropped_by
    has_evidence_pages = written is not None and written.evidence
    if cfg.evidence == "any" or has_evidence_pages or record.episode(sample.ref) is not None:
        return None
    return "no evidence shown"


def _key(sample: EpisodeSummary, written: EpisodeText, order: list[Rank]) -> tuple[float, ...]:
    """Return the sort key: the best first, missing values last."""
    values: dict[Rank, float] = {
        "judge": math.inf if sample.judge is None else -sample.judge,
        "ndcg": math.inf if sample.ndcg is None else -sample.ndcg,
        "searches": sample.searches,
        "crops": sample.crops,
        "turns": sample.turns,
        "length": written.length,
    }
    return tuple(values[name] for name in order)
