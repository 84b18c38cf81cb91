"""The command `search focus`: select the data of the next round, with a funnel of counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from scorekit.numeric.thresholds import above
from scorekit.report.page import chart_image
from trainer.search.curation.buckets import BUCKETS, bucket_of
from trainer.search.curation.config import CurationConfig, FocusConfig
from trainer.search.curation.config_sections import Rule
from trainer.search.curation.dataset import CurationResult, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page, means_chart
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, mean_of
from trainer.sft.curation_record import EXCLUDE, VERIFY, CurationRecord

#: Rule -> the reason of a kept row.
TAKEN: Final[dict[Rule, str]] = {
    "hard_a": "hard A",
    "bucket_0": "bucket 0",
    "last_round": "low in the last round",
    "unscored": "unscored",
    "all": "played again",
}
_COLORS = dict(zip(BUCKETS, ("C2", "C0", "C3", "C7"), strict=True))


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of a row. bucket: of BUCKETS. low: mean of the episodes that count for A; last:
    mean of the last run (None: no value). played: the last run has episodes of it."""

    bucket: str
    low: float | None
    last: float | None
    played: bool


def make_focus(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    decided: PriorDecisions,
) -> CurationResult:
    """Return the rows that the rules select, without rows that earlier decisions drop."""
    focus_cfg, last = cfg.focus, len(read) - 1
    steps = {entry.step for entry in decided.record}
    result = CurationResult("focus", focus_cfg, read, decided.inputs)
    stages: dict[str, Counter[str]] = {name: Counter() for name in _stages(focus_cfg, steps)}
    fitting: Counter[str] = Counter()
    for prompt in prompts:
        row = _row(prompt, cfg, decided, last)
        rule = _rule(row, focus_cfg)
        id = prompt.question.id
        reached = ["questions"]
        reached += ["scored"] if row.bucket != "unscored" else []
        reached += ["in the last round"] if row.played else []
        if rule is None:
            is_kept, reason = False, _rejection_reason(row, focus_cfg)
        else:
            against = decided.record.dropped(id)
            is_kept, reason = against is None, against.text if against else TAKEN[rule]
            fitting[TAKEN[rule]] += 1
            reached += ["taken", *_passed(id, decided.record)]
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
                entry = decided.record.question(id, step)
                stats[name] = entry.reason if entry and entry.verdict != "open" else None
        result.decisions.append(Decision(id, is_kept, reason, stats, refs(prompt)))
        if is_kept:
            result.rows.append(question_row(prompt.question, bucket=row.bucket))
    result.manifest_extra = {
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
    return result


def _row(prompt: CuratedPrompt, cfg: CurationConfig, decided: PriorDecisions, last: int) -> _Row:
    focus_cfg = cfg.focus
    id = prompt.question.id
    bucket = bucket_of(prompt, cfg.buckets) if decided.buckets is None else decided.buckets[id]
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
    """Return the stages of the funnel. steps: commands with decisions."""
    is_used = {
        "questions": True,
        "scored": bool({"hard_a", "bucket_0"} & set(focus_cfg.take)),
        "in the last round": "last_round" in focus_cfg.take,
        "taken": True,
        **{stage: step in steps for stage, step in _CHECKS.items()},
    }
    return [name for name, used in is_used.items() if used]


def focus_page(result: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> str:
    """Return report.html: the funnel as table and chart, the rules, and the means they cut."""
    focus_cfg = result.settings
    assert isinstance(focus_cfg, FocusConfig)
    funnel: list[dict[str, Any]] = result.manifest_extra["funnel"]
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
    num_kept = Counter(decision.reason for decision in result.decisions if decision.is_kept)
    rules = [
        [
            f"{TAKEN[rule]}: {words[rule]}",
            result.manifest_extra["taken"][TAKEN[rule]],
            num_kept[TAKEN[rule]],
        ]
        for rule in focus_cfg.take
    ]
    key = "last_mean" if "last_round" in focus_cfg.take else "mean"
    border = focus_cfg.last_round if "last_round" in focus_cfg.take else focus_cfg.hard_a
    label = f"mean {focus_cfg.measure}" + (" in the last round" if key == "last_mean" else "")
    charts = [
        chart_image("rows at each stage, by bucket", "rows", partial(_bars, funnel)),
        means_chart(result.decisions, key, label, border),
    ]
    sections = [
        Section("Funnel", [], ["stage", "rows", *BUCKETS], table, charts),
        Section("Rules", [], ["rule", "rows that fit it", "kept"], rules),
    ]
    return curation_page(result, "The next round", sections, prompts)


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
