"""Which prompts are rare successes, and which of their episodes are the best, by figures alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scorekit.numeric.thresholds import above
from trainer.search.curation.dataset import Decision, refs
from trainer.search.curation.distil.config import DistillConfig, Rank
from trainer.search.curation.distil.targets import Fault, repeated, target_fault
from trainer.search.curation.samples import CuratedPrompt, Sample, has_evidence
from trainer.search.curation.spool import Spool
from trainer.search.records import Trajectory
from trainer.sft.curation_record import CurationRecord


@dataclass(frozen=True, slots=True)
class Written:
    """What an episode's policy wrote. fault: why it is no example. repeats: whether a search asks
    what the one before it did. length: letters. evidence: whether the answer rests on pages with
    the facts. digest: of the question and the turns, equal for duplicates."""

    fault: Fault | None
    repeats: bool
    length: int
    evidence: bool
    digest: str


@dataclass(slots=True)
class Wrote:
    """Of the episodes of all runs that were judged at all right, under their `Sample.ref`; `visit`
    is given every episode."""

    of: Spool[Written] = field(default_factory=lambda: Spool(Written))

    def visit(self, trajectory: Trajectory, sample: Sample) -> None:
        """Look at one while it is in memory."""
        if sample.judge:
            texts = [turn.text for turn in trajectory.turns if not turn.forced]
            written = Written(
                fault=target_fault(trajectory),
                repeats=bool(repeated(trajectory)),
                length=sum(map(len, texts)),
                evidence=has_evidence(trajectory),
                digest=_digest([trajectory.question.question, *texts]),
            )
            self.of.append(written, sample.ref)


def _digest(texts: Sequence[str]) -> str:
    """SHA-256 of texts, whatever blanks they are written with."""
    return hashlib.sha256(
        json.dumps(["".join(text.split()) for text in texts]).encode()
    ).hexdigest()


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Of one prompt. eligible: the episodes that may be rows, the best first. rate: share of those
    with a score that are right; None where none has one."""

    rate: float | None
    eligible: list[Sample]
    decisions: list[Decision]


def choose(
    prompt: CuratedPrompt, wrote: Spool[Written], cfg: DistillConfig, record: CurationRecord
) -> PromptChoice:
    """A prompt that is not taken has one decision for all its episodes, else each has its own; of
    the eligible ones there is none yet. record: what was decided about prompts and episodes."""
    counted, rate, right = _rate(prompt, cfg)
    figures = {"question_id": prompt.question.id, "rate": rate, "right": right}
    why = record.no_example(prompt.question.id, None) if right else None
    if why := why or _not_taken(prompt, rate, right, cfg):
        decision = Decision(prompt.question.id, False, why, figures, refs(prompt))
        return PromptChoice(rate, [], [decision])
    counts = {sample.ref for sample in counted}
    eligible, decisions = [], []
    for sample in prompt.samples:
        written = wrote.get(sample.ref)
        why = _no_row(sample, sample.ref in counts, written, cfg)
        why = why or _no_evidence(prompt, sample, written, cfg, record)
        if why:
            decisions.append(decided(sample, prompt, rate, False, why))
        else:
            eligible.append(sample)
    eligible.sort(key=lambda sample: _key(sample, wrote[sample.ref], cfg.order))
    return PromptChoice(rate, eligible, decisions)


def decided(
    sample: Sample,
    prompt: CuratedPrompt,
    rate: float | None,
    kept: bool,
    why: str,
    **more: str,
) -> Decision:
    """Of one episode. more: further figures."""
    figures = {
        "question_id": prompt.question.id,
        "rate": rate,
        "judge": sample.judge,
        "ndcg": sample.ndcg,
        "searches": sample.searches,
        "turns": sample.turns,
        "end": sample.end,
        **more,
    }
    return Decision(sample.ref, kept, why, figures, [sample.ref])


def succeeds_rarely(prompt: CuratedPrompt, cfg: DistillConfig) -> bool:
    """Whether the rules take a prompt: it has right episodes, and few enough of them."""
    _, rate, right = _rate(prompt, cfg)
    return _not_taken(prompt, rate, right, cfg) is None


def _rate(prompt: CuratedPrompt, cfg: DistillConfig) -> tuple[list[Sample], float | None, int]:
    """(episodes that count, the share of them that is right, how many are)."""
    counted = prompt.counted(cfg.combine, "judge")
    right = sum(_is_right(sample, cfg) for sample in counted)
    return counted, right / len(counted) if counted else None, right


def _is_right(sample: Sample, cfg: DistillConfig) -> bool:
    return sample.judge is not None and sample.judge >= cfg.success


def _not_taken(
    prompt: CuratedPrompt, rate: float | None, right: int, cfg: DistillConfig
) -> str | None:
    """Why none of a prompt's episodes is wanted."""
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
    sample: Sample, counts: bool, written: Written | None, cfg: DistillConfig
) -> str | None:
    """Why an episode is no row."""
    if sample.judge is None:
        return "not judged"
    if not counts:
        return "of another step or run than those that count"
    if written is None or not _is_right(sample, cfg):
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
    return written.fault


def _no_evidence(
    prompt: CuratedPrompt,
    sample: Sample,
    written: Written | None,
    cfg: DistillConfig,
    record: CurationRecord,
) -> str | None:
    """Why a right answer rests on nothing that was shown; None where it does not."""
    if against := record.no_example(prompt.question.id, sample.ref):
        return against
    shown = written is not None and written.evidence
    if cfg.evidence == "any" or shown or record.episode(sample.ref) is not None:
        return None
    return "no evidence shown"


def _key(sample: Sample, written: Written, order: list[Rank]) -> tuple[float, ...]:
    """Sorts the best first; a figure that was not had is behind all others. Equal ones stay in the
    order of the runs."""
    of: dict[Rank, float] = {
        "judge": math.inf if sample.judge is None else -sample.judge,
        "ndcg": math.inf if sample.ndcg is None else -sample.ndcg,
        "searches": sample.searches,
        "crops": sample.crops,
        "turns": sample.turns,
        "length": written.length,
    }
    return tuple(of[name] for name in order)
