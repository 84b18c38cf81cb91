"""`search focus`: the data of the next round, and the funnel that leads to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from scorekit.numeric.thresholds import above
from scorekit.report.page import picture
from trainer.search.curation.buckets import BUCKETS, bucket_of
from trainer.search.curation.config import CurationConfig, FocusConfig
from trainer.search.curation.dataset import Curated, Decision, question_row, refs
from trainer.search.curation.known import Known
from trainer.search.curation.measures import Rule
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, mean_of
from trainer.sft.curation_record import EXCLUDE, VERIFY, CurationRecord

#: Why a row is kept, by its rule.
TAKEN: Final[dict[Rule, str]] = {
    "hard_a": "hard A",
    "bucket_0": "bucket 0",
    "last_round": "low in the last round",
    "unscored": "unscored",
    "all": "played again",
}
_COLOURS = dict(zip(BUCKETS, ("C2", "C0", "C3", "C7"), strict=True))


@dataclass(frozen=True, slots=True)
class _Row:
    """bucket: of BUCKETS. low: mean of the episodes that count for A; last: of the last run's;
    None: none has a value. played: whether the last run has episodes of it."""

    bucket: str
    low: float | None
    last: float | None
    played: bool


def make_focus(
    prompts: Sequence[CuratedPrompt], read: Sequence[CuratedRun], cfg: CurationConfig, known: Known
) -> Curated:
    """The rows that the rules take, without those that are known to be bad. known: of these
    prompts."""
    of, last = cfg.focus, len(read) - 1
    steps = {entry.step for entry in known.record}
    made = Curated("focus", of, read, known.inputs)
    stages: dict[str, Counter[str]] = {name: Counter() for name in _stages(of, steps)}
    fitting: Counter[str] = Counter()
    for prompt in prompts:
        row = _row(prompt, cfg, known, last)
        rule = _rule(row, of)
        id = prompt.question.id
        reached = ["questions"]
        reached += ["scored"] if row.bucket != "unscored" else []
        reached += ["in the last round"] if row.played else []
        if rule is None:
            kept, reason = False, _why_not(row, of)
        else:
            against = known.record.dropped(id)
            kept, reason = against is None, against.text if against else TAKEN[rule]
            fitting[TAKEN[rule]] += 1
            reached += ["taken", *_passed(id, known.record)]
        for stage in reached:
            if stage in stages:
                stages[stage][row.bucket] += 1
        figures: dict[str, Any] = {
            "bucket": row.bucket,
            "mean": row.low,
            "last_mean": row.last,
            "document": prompt.question.file_name,
        }
        for name, step in (("class", VERIFY), ("excluded", EXCLUDE)):
            if step in steps:
                entry = known.record.question(id, step)
                figures[name] = entry.reason if entry and entry.verdict != "open" else None
        made.decisions.append(Decision(id, kept, reason, figures, refs(prompt)))
        if kept:
            made.rows.append(question_row(prompt.question, bucket=row.bucket))
    made.told = {
        "funnel": [
            {"stage": name, "rows": found.total(), **{of: found[of] for of in BUCKETS}}
            for name, found in stages.items()
        ],
        "taken": {TAKEN[rule]: fitting[TAKEN[rule]] for rule in of.take},
    }
    return made


def _row(prompt: CuratedPrompt, cfg: CurationConfig, known: Known, last: int) -> _Row:
    of = cfg.focus
    id = prompt.question.id
    bucket = bucket_of(prompt, cfg.buckets) if known.buckets is None else known.buckets[id]
    there = [one for one in prompt.samples if one.order == last]
    low = prompt.mean(of.combine, of.measure)
    return _Row(bucket, low, mean_of(there, of.measure), bool(there))


def _rule(row: _Row, of: FocusConfig) -> Rule | None:
    """The first that the row fits."""
    fits: Mapping[Rule, Callable[[], bool]] = {
        "hard_a": lambda: row.bucket == "A" and _is_low(row.low, of.hard_a),
        "bucket_0": lambda: row.bucket == "0",
        "last_round": lambda: _is_low(row.last, of.last_round),
        "unscored": lambda: row.bucket == "unscored",
        "all": lambda: True,
    }
    return next((rule for rule in of.take if fits[rule]()), None)


def _is_low(mean: float | None, most: float) -> bool:
    return mean is not None and not above(mean, most)


def _why_not(row: _Row, of: FocusConfig) -> str:
    """Of a row that no rule takes."""
    if "last_round" in of.take and row.played:
        told = "no score" if row.last is None else f"above {of.last_round:g}"
        return f"in the last round: {told}"
    if not {"hard_a", "bucket_0", "unscored"} & set(of.take):
        return "not in the last round"
    if row.bucket == "A" and "hard_a" in of.take:
        return "A: no score" if row.low is None else f"A: above {of.hard_a:g}"
    return {"B": "mastered", "unscored": "unscored"}.get(row.bucket, f"bucket {row.bucket}")


#: Stages of the funnel behind the rules, each with the step whose decisions it applies.
_CHECKS: Final = {
    "not verified bad": VERIFY,
    "not dropped by hallucinations": "hallucinations",
    "not excluded": EXCLUDE,
}


def _passed(id: str, record: CurationRecord) -> list[str]:
    """The checks that a row passes, up to the first that drops it."""
    passed = []
    for stage, step in _CHECKS.items():
        entry = record.question(id, step)
        if entry is not None and entry.verdict == "drop":
            break
        passed.append(stage)
    return passed


def _stages(of: FocusConfig, steps: Collection[str]) -> list[str]:
    """Those that these rules have. steps: whose decisions are known."""
    wanted = {
        "questions": True,
        "scored": bool({"hard_a", "bucket_0"} & set(of.take)),
        "in the last round": "last_round" in of.take,
        "taken": True,
        **{stage: step in steps for stage, step in _CHECKS.items()},
    }
    return [name for name, there in wanted.items() if there]


def focus_page(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> str:
    """report.html: the funnel as a table and as a picture, the rules, the means that they cut."""
    of = made.settings
    assert isinstance(of, FocusConfig)
    funnel: list[dict[str, Any]] = made.told["funnel"]
    table = [[at["stage"], at["rows"], *(at[name] for name in BUCKETS)] for at in funnel]
    words = {
        "hard_a": f"in bucket A, mean {of.measure} of at most {of.hard_a:g} ({of.combine})",
        "bucket_0": "in bucket 0",
        "last_round": f"in the last run, mean {of.measure} there of at most {of.last_round:g}",
        "unscored": "no episode has a score",
        "all": "every row that was given (--rows)",
    }
    kept = Counter(one.reason for one in made.decisions if one.kept)
    rules = [
        [f"{TAKEN[rule]}: {words[rule]}", made.told["taken"][TAKEN[rule]], kept[TAKEN[rule]]]
        for rule in of.take
    ]
    figure = "last_mean" if "last_round" in of.take else "mean"
    border = of.last_round if "last_round" in of.take else of.hard_a
    cut = [one.figures[figure] for one in made.decisions if one.figures[figure] is not None]
    label = f"mean {of.measure}" + (" in the last round" if figure == "last_mean" else "")
    pictures = [
        picture("rows at each stage, by bucket", "rows", partial(_bars, funnel)),
        picture(f"prompts by {label}", label, partial(_cut, cut, border)),
    ]
    sections = [
        Section("Funnel", [], ["stage", "rows", *BUCKETS], table, pictures),
        Section("Rules", [], ["rule", "rows that fit it", "kept"], rules),
    ]
    return curation_page(made, "The next round", sections, prompts)


def _bars(funnel: Sequence[Mapping[str, Any]], axes: Any) -> int:
    """A bar a stage, the first on top."""
    left = [0] * len(funnel)
    names = [str(at["stage"]) for at in funnel]
    there = [name for name in BUCKETS if any(at[name] for at in funnel)]
    for name in there:
        widths = [at[name] for at in funnel]
        axes.barh(names, widths, left=left, color=_COLOURS[name], label=name)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    for place, at in enumerate(funnel):
        axes.text(left[place], place, f" {at['rows']:,}", va="center", fontsize=8)
    axes.set_xlim(0, max(left, default=1) * 1.18 or 1)
    axes.invert_yaxis()
    return len(there)


def _cut(means: Sequence[float], border: float, axes: Any) -> int:
    axes.hist(means, bins=[place / 20 for place in range(21)], color="C0")
    axes.axvline(border, color="C3", linewidth=1)
    axes.set_ylabel("prompts")
    return 1 if means else 0
