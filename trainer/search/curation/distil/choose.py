"""Which prompts are rare successes, and which of their episodes are the best, by figures alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scorekit.numeric.thresholds import above
from trainer.search.curation.dataset import Decision, refs
from trainer.search.curation.distil.config import DistillConfig, Rank
from trainer.search.curation.distil.targets import Fault, repeated, target_fault
from trainer.search.curation.samples import CuratedPrompt, Sample
from trainer.search.curation.spool import Spool
from trainer.search.records import Trajectory


@dataclass(frozen=True, slots=True)
class Written:
    """What an episode's policy wrote. fault: why it is no example. repeats: whether a search asks
    what the one before it did. length: letters."""

    fault: Fault | None
    repeats: bool
    length: int


@dataclass(slots=True)
class Wrote:
    """Of the episodes of all runs that were judged at all right, under their `Sample.ref`; `visit`
    is given every episode."""

    of: Spool[Written] = field(default_factory=lambda: Spool(Written))

    def visit(self, trajectory: Trajectory, sample: Sample) -> None:
        """Look at one while it is in memory."""
        if sample.judge:
            own = sum(len(turn.text) for turn in trajectory.turns if not turn.forced)
            found = Written(target_fault(trajectory), bool(repeated(trajectory)), own)
            self.of.append(found, sample.ref)


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Of one prompt. eligible: the episodes that may be rows, the best first. rate: share of those
    with a score that are right; None where none has one."""

    rate: float | None
    eligible: list[Sample]
    decisions: list[Decision]


def choose(prompt: CuratedPrompt, wrote: Spool[Written], cfg: DistillConfig) -> PromptChoice:
    """A prompt that is not taken has one decision for all its episodes, else each has its own; of
    the eligible ones there is none yet."""
    counted = prompt.counted(cfg.combine, "judge")
    right = [sample for sample in counted if _is_right(sample, cfg)]
    rate = len(right) / len(counted) if counted else None
    figures = {"question_id": prompt.question.id, "rate": rate, "right": len(right)}
    if why := _not_taken(prompt, rate, len(right), cfg):
        decision = Decision(prompt.question.id, False, why, figures, refs(prompt))
        return PromptChoice(rate, [], [decision])
    counts = {sample.ref for sample in counted}
    eligible, decisions = [], []
    for sample in prompt.samples:
        if why := _no_row(sample, sample.ref in counts, wrote.get(sample.ref), cfg):
            decisions.append(decided(sample, prompt, rate, False, why))
        else:
            eligible.append(sample)
    eligible.sort(key=lambda sample: _key(sample, wrote[sample.ref], cfg.order))
    return PromptChoice(rate, eligible, decisions)


def decided(
    sample: Sample, prompt: CuratedPrompt, rate: float | None, kept: bool, why: str
) -> Decision:
    """Of one episode."""
    figures = {
        "question_id": prompt.question.id,
        "rate": rate,
        "judge": sample.judge,
        "ndcg": sample.ndcg,
        "searches": sample.searches,
        "turns": sample.turns,
        "end": sample.end,
    }
    return Decision(sample.ref, kept, why, figures, [sample.ref])


def _is_right(sample: Sample, cfg: DistillConfig) -> bool:
    return sample.judge is not None and sample.judge >= cfg.success


def _not_taken(
    prompt: CuratedPrompt, rate: float | None, right: int, cfg: DistillConfig
) -> str | None:
    """Why none of a prompt's episodes is wanted."""
    if not prompt.samples:
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
