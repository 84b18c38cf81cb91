"""The step `focus`: select the data of the next round, with a funnel of counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import Field

from scorekit.config import Config
from scorekit.numeric import above
from trainer.search.data import question_row
from trainer.search.steps.buckets import BUCKETS, bucket_of
from trainer.search.steps.episodes import (
    Combine,
    CuratedPrompt,
    Measure,
    mean_of,
    refs,
)
from trainer.search.steps.output import means_chart
from trainer.search.steps.shared_config import SharedConfig
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work
from trainer.sft.curation_record import EXCLUDE, VERIFY, CurationRecord

#: Why a row is in the next round's data.
Rule = Literal["hard_a", "bucket_0", "last_round", "unscored", "all"]

#: Rule -> the reason of a kept row.
TAKEN: Final[dict[Rule, str]] = {
    "hard_a": "hard A",
    "bucket_0": "bucket 0",
    "last_round": "low in the last round",
    "unscored": "unscored",
    "all": "played again",
}


_COLORS = dict(zip(BUCKETS, ("C2", "C0", "C3", "C7"), strict=True))


class FocusConfig(Config):
    """The rules that select the questions of the next round."""

    take: list[Rule] = Field(
        default=["hard_a", "bucket_0"],
        min_length=1,
        description="A row is taken by the first of these rules that it fits. hard_a: in bucket A, "
        "and low; bucket_0; last_round: low in the last run given; unscored: no episode has a "
        "score; all: every row (of --rows). The first round is [hard_a, bucket_0], a later one "
        "[last_round]; [all] plays the rows of an earlier `focus` again, without those that were "
        "condemned since.",
    )
    measure: Measure = Field("reward", description="What low is said of.")
    combine: Combine = Field("last_run", description="hard_a: of which episodes, as in `buckets`.")
    hard_a: float = Field(0.2, description="A row of bucket A is low with a mean of at most this.")
    last_round: float = Field(
        0.3, description="A row of the last run is low with a mean there of at most this."
    )


class Focus(Step[FocusConfig]):
    """Select the next round's data: hard and unsolved questions without bad ones."""

    name = "focus"
    title = "The next round"
    config = FocusConfig
    options = (
        *("run", "out", "buckets", "verified", "exclude", "record", "rows"),
        *("config", "set_", "overwrite"),
    )
    further = MappingProxyType(
        {
            "buckets": (
                Annotated[
                    Path | None,
                    typer.Option(
                        help="Folder of `search buckets`; without it, buckets are made of --run."
                    ),
                ],
                None,
            )
        }
    )
    also = ("buckets",)
    moves = ("focused", "rows")
    drops = True

    def takes_rows(self, cfg: SharedConfig) -> bool:
        """Return whether the rows of an earlier `focus` are played again."""
        return "all" in cfg.focus.take

    def decide(self, work: Work[FocusConfig], answers: Mapping[str, Any]) -> Outcome:
        """Return the rows that the rules select, without rows that earlier decisions drop."""
        focus_cfg, record = work.settings, work.prior.record
        steps = {entry.step for entry in record}
        outcome = self.outcome(work)
        stages: dict[str, Counter[str]] = {name: Counter() for name in _stages(focus_cfg, steps)}
        fitting: Counter[str] = Counter()
        for prompt in work.prompts:
            row = _row(prompt, work)
            rule = _rule(row, focus_cfg)
            id = prompt.question.id
            reached = ["questions"]
            reached += ["scored"] if row.bucket != "unscored" else []
            reached += ["in the last round"] if row.played else []
            if rule is None:
                is_kept, reason = False, _rejection_reason(row, focus_cfg)
            else:
                against = record.dropped(id)
                is_kept, reason = against is None, against.text if against else TAKEN[rule]
                fitting[TAKEN[rule]] += 1
                reached += ["taken", *_passed(id, record)]
            for stage in reached:
                if stage in stages:
                    stages[stage][row.bucket] += 1
            stats: dict[str, Any] = {
                "bucket": row.bucket,
                "mean": row.low,
                "last_mean": row.last,
                "document": prompt.question.file_name,
            }
            for name, step in (("class", VERIFY), ("excluded", EXCLUDE)):
                if step in steps:
                    entry = record.question(id, step)
                    stats[name] = entry.reason if entry and entry.verdict != "open" else None
            kept_row = question_row(prompt.question, bucket=row.bucket) if is_kept else None
            decision = Decision(id, is_kept, reason, stats, refs(prompt), kept_row)
            outcome.decisions.append(decision)
        outcome.extra = {
            "funnel": [
                {
                    "stage": name,
                    "rows": bucket_counts.total(),
                    **{bucket: bucket_counts[bucket] for bucket in BUCKETS},
                }
                for name, bucket_counts in stages.items()
            ],
            "taken": {TAKEN[rule]: fitting[TAKEN[rule]] for rule in focus_cfg.take},
        }
        return outcome

    def sections(self, work: Work[FocusConfig], outcome: Outcome) -> list[Section]:
        """Return the funnel as table and chart, the rules, and the means they cut."""
        from scorekit.report.page import chart_image

        focus_cfg = work.settings
        funnel: list[dict[str, Any]] = outcome.extra["funnel"]
        table = [
            [stage["stage"], stage["rows"], *(stage[name] for name in BUCKETS)] for stage in funnel
        ]
        words = {
            "hard_a": f"in bucket A, mean {focus_cfg.measure} of at most {focus_cfg.hard_a:g} "
            f"({focus_cfg.combine})",
            "bucket_0": "in bucket 0",
            "last_round": f"in the last run, mean {focus_cfg.measure} there of at most "
            f"{focus_cfg.last_round:g}",
            "unscored": "no episode has a score",
            "all": "every row that was given (--rows)",
        }
        num_kept = Counter(decision.reason for decision in outcome.decisions if decision.is_kept)
        rules = [
            [
                f"{TAKEN[rule]}: {words[rule]}",
                outcome.extra["taken"][TAKEN[rule]],
                num_kept[TAKEN[rule]],
            ]
            for rule in focus_cfg.take
        ]
        key = "last_mean" if "last_round" in focus_cfg.take else "mean"
        border = focus_cfg.last_round if "last_round" in focus_cfg.take else focus_cfg.hard_a
        label = f"mean {focus_cfg.measure}" + (" in the last round" if key == "last_mean" else "")
        charts = [
            chart_image("rows at each stage, by bucket", "rows", partial(_bars, funnel)),
            means_chart(outcome.decisions, key, label, border),
        ]
        return [
            Section("Funnel", [], ["stage", "rows", *BUCKETS], table, charts),
            Section("Rules", [], ["rule", "rows that fit it", "kept"], rules),
        ]


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of a row.

    bucket: of BUCKETS.
    low: mean of the episodes that count for A.
    last: mean of the last run (None: no value).
    played: the last run has episodes of it."""

    bucket: str
    low: float | None
    last: float | None
    played: bool


def _row(prompt: CuratedPrompt, work: Work[FocusConfig]) -> _Row:
    focus_cfg, buckets, last = work.settings, work.prior.buckets, len(work.runs) - 1
    id = prompt.question.id
    bucket = bucket_of(prompt, work.cfg.buckets) if buckets is None else buckets[id]
    last_samples = [sample for sample in prompt.samples if sample.order == last]
    low = prompt.mean(focus_cfg.combine, focus_cfg.measure)
    return _Row(bucket, low, mean_of(last_samples, focus_cfg.measure), bool(last_samples))


def _rule(row: _Row, focus_cfg: FocusConfig) -> Rule | None:
    """Return the first rule that a row fits, or None."""
    fits: Mapping[Rule, Callable[[], bool]] = {
        "hard_a": lambda: row.bucket == "A" and _is_low(row.low, focus_cfg.hard_a),
        "bucket_0": lambda: row.bucket == "0",
        "last_round": lambda: _is_low(row.last, focus_cfg.last_round),
        "unscored": lambda: row.bucket == "unscored",
        "all": lambda: True,
    }
    return next((rule for rule in focus_cfg.take if fits[rule]()), None)


def _is_low(mean: float | None, max_mean: float) -> bool:
    return mean is not None and not above(mean, max_mean)


def _rejection_reason(row: _Row, focus_cfg: FocusConfig) -> str:
    """Return the reason of a row that no rule selects."""
    if "last_round" in focus_cfg.take and row.played:
        score_text = "no score" if row.last is None else f"above {focus_cfg.last_round:g}"
        return f"in the last round: {score_text}"
    if not {"hard_a", "bucket_0", "unscored"} & set(focus_cfg.take):
        return "not in the last round"
    if row.bucket == "A" and "hard_a" in focus_cfg.take:
        return "A: no score" if row.low is None else f"A: above {focus_cfg.hard_a:g}"
    return {"B": "mastered", "unscored": "unscored"}.get(row.bucket, f"bucket {row.bucket}")


#: Stages of the funnel after the rules -> the command whose decisions they apply.
_CHECKS: Final = {
    "not verified bad": VERIFY,
    "not dropped by hallucinations": "hallucinations",
    "not excluded": EXCLUDE,
}


def _passed(id: str, record: CurationRecord) -> list[str]:
    """Return the checks that a row passes, up to the first that drops it."""
    passed = []
    for stage, step in _CHECKS.items():
        entry = record.question(id, step)
        if entry is not None and entry.verdict == "drop":
            break
        passed.append(stage)
    return passed


def _stages(focus_cfg: FocusConfig, steps: Collection[str]) -> list[str]:
    """Return the stages of the funnel.

    steps: commands with decisions.
    """
    is_used = {
        "questions": True,
        "scored": bool({"hard_a", "bucket_0"} & set(focus_cfg.take)),
        "in the last round": "last_round" in focus_cfg.take,
        "taken": True,
        **{stage: step in steps for stage, step in _CHECKS.items()},
    }
    return [name for name, used in is_used.items() if used]


def _bars(funnel: Sequence[Mapping[str, Any]], axes: Any) -> int:
    """Draw a bar for each stage, the first at the top."""
    starts = [0] * len(funnel)
    names = [str(stage["stage"]) for stage in funnel]
    present = [name for name in BUCKETS if any(stage[name] for stage in funnel)]
    for name in present:
        widths = [stage[name] for stage in funnel]
        axes.barh(names, widths, left=starts, color=_COLORS[name], label=name)
        starts = [sum(pair) for pair in zip(starts, widths, strict=True)]
    for index, stage in enumerate(funnel):
        axes.text(starts[index], index, f" {stage['rows']:,}", va="center", fontsize=8)
    axes.set_xlim(0, max(starts, default=1) * 1.18 or 1)
    axes.invert_yaxis()
    return len(present)
