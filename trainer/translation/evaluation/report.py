"""The pages: report.html of a run, evaluation.html of a policy, comparison.html of two.

trainer/runs/evaluation/pages.py has what the tasks share. trainer/runs/run_log.py and
trainer/translation/dumps.py describe the files that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.paired import PairedStat
from scorekit.report.page import chart_image
from scorekit.report.render import COLOURS, cut_segments, hint
from scorekit.schemas import ErrorSpan
from trainer.runs.evaluation.files import lines_by_set
from trainer.runs.evaluation.pages import (
    Lines,
    TaskPages,
    draw_curves,
    first_and_last,
    group_table,
    read_run,
    set_values,
)
from trainer.runs.run_log import read_jsonl
from trainer.translation.evaluation.compare import changed_most
from trainer.translation.evaluation.stats import (
    A_REWARD,
    CHRF,
    NO_REWARD,
    curves,
    ranking,
    read_evaluations,
    severity_counts,
    table,
)

_MAX_EXAMPLES = 12  # examples of each kind
_BINS = 40  # of the histogram of advantages


def write_report(
    run_dir: str | Path, title: str = "Training run", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` into a run's folder and return its path.

    notes: paragraphs for the top of the page.
    Raises UserError if the folder has no run.
    """
    folder = Path(run_dir)
    updates, _ = read_run(folder)
    sets = lines_by_set(read_evaluations(folder))
    return _pages().write_run(
        folder,
        updates,
        [_set_values(folder, name, lines) for name, lines in sets.items()],
        curves=draw_run(folder, updates, sets),
        title=title,
        notes=notes,
    )


def _set_values(folder: Path, name: str, evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of a set of held-out sources, before and after."""
    examples: list[tuple[str, Sequence[Any]]] = []
    if len(evals) > 1:
        first, last = first_and_last(folder, evals, "sources", lambda line: line["src"])
        pairs = list(zip(first, last, strict=True))[:_MAX_EXAMPLES]
        examples = [
            *changed_most(first, last, _MAX_EXAMPLES),
            ("The first of the set", pairs),
        ]
    return set_values(name, evals, table(*evals), examples) | {
        "gaps": ", ".join(_gaps(evals)),
        "pairs": _pair_table(evals[0], evals[-1]),
    }


def _gaps(evals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the evaluations that a service scored only in part."""
    for line in evals:
        for stat in table(line):
            coverage = line.get(stat.coverage)
            if coverage is not None and coverage < 1:
                yield f"{stat.ranks} after update {line['update']} ({coverage:.0%})"


def write_evaluation(
    path: Path,
    policy: str,
    stats: Mapping[str, Any],
    lines: Sequence[dict[str, Any]],
    config: str = "",
) -> Path:
    """Write a page of a report's stats, its worst translations and its first ones."""
    failed = [line for line in lines if line["error"]][:_MAX_EXAMPLES]
    return _pages().write_evaluation(
        path,
        policy,
        stats,
        table(stats),
        [
            *_worst(lines),
            ("Without a score", failed),
            ("The first of the set", lines[:_MAX_EXAMPLES]),
        ],
        title=f"Evaluation of {policy}",
        pairs=_pair_table(stats, stats),
        severity_rows=severity_counts(lines),
        config=config,
    )


def _worst(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Sequence[dict[str, Any]]]]:
    """Yield (title, lines) by the first stat that ranks examples and that some of them have."""
    for judge in ranking():
        values = [(judge.value_of(line), line) for line in lines]
        scored = [(judge.sign * value, line) for value, line in values if value is not None]
        if scored:
            scored.sort(key=lambda pair: pair[0])
            yield f"Worst by {judge.label}", [line for _, line in scored[:_MAX_EXAMPLES]]
            return


def write_comparison(
    path: Path,
    names: tuple[str, str],
    groups: Mapping[str, Sequence[PairedStat]],
    first: Sequence[dict[str, Any]],
    second: Sequence[dict[str, Any]],
) -> Path:
    """Write a page of the intervals of the differences, and of the largest changes."""
    examples = changed_most(first, second, _MAX_EXAMPLES)
    return _pages().write_comparison(path, names, groups, examples)


def _pages() -> TaskPages:
    return TaskPages(
        macros="trainer/translation/evaluation/macros.html",
        units="sources",
        answer="translation",
        filters={"segments": _segments, "scores": _scores},
        values={"label": "mt", "missing": "score"},
    )


def _pair_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stats of each language pair before and after, for the template; None for one
    pair."""
    old, new = before.get("pairs") or {}, after.get("pairs") or {}
    if not old:
        return None
    all_values = [*old.values(), *new.values()]
    stats = [
        replace(stat, title=stat.title.removesuffix(NO_REWARD).removesuffix(A_REWARD))
        for stat in table(before, after)
        if stat.by_group
        and not {pair_values.get(stat.key) for pair_values in all_values} <= {*stat.hidden_at}
    ]
    return group_table(stats, old, new)


def _segments(line: dict[str, Any]) -> list[dict[str, str]]:
    """Return text, class and tooltip of each part of a translation, for the template."""
    spans = [ErrorSpan.model_validate(span) for span in line["error_spans"] or []]
    return [
        {
            "text": segment.text,
            "kind": _kind(segment.span) if segment.span else "",
            "hint": hint(segment.span) if segment.span else "",
        }
        for segment in cut_segments(line["mt"], spans)
    ]


def _scores(line: Mapping[str, Any]) -> str:
    """Return the scores that rank a translation, and its chrF if it has one."""
    texts = [
        f"{judge.label} {'–' if (value := judge.value_of(line)) is None else format(value, '.3f')}"
        for judge in ranking()
    ]
    chrf = CHRF.value_of(line)
    return " · ".join([*texts, *([] if chrf is None else [f"chrF {chrf:.0f}"])])


def _kind(span: ErrorSpan) -> str:
    """Return the class of a mark in trainer/translation/evaluation/macros.html."""
    return span.severity.lower() if span.severity in COLOURS else "other"


def draw_run(folder: Path, updates: Lines, evals: Mapping[str, Lines]) -> list[str]:
    """Return one chart for each curve that has points, and the histogram of advantages.

    evals: lines of eval.jsonl by the names of their sets.
    """
    histogram = chart_image(
        "advantages (normalized, share of tokens)",
        "advantage",
        partial(_draw_histogram, _sampled_advantages(folder)),
    )
    every = [line for lines in evals.values() for line in lines]
    return [
        *draw_curves(curves(*every), updates, evals),
        *([] if histogram is None else [histogram]),
    ]


def _sampled_advantages(folder: Path) -> dict[int, list[float]]:
    """Return the advantages of the first, middle and last update whose completions were dumped.

    A token with exactly 0 was not trained on.
    """
    dumps = sorted((folder / "completions").glob("train-*.jsonl"))
    chosen = sorted({0, len(dumps) // 2, len(dumps) - 1}) if dumps else []
    return {
        int(dumps[index].stem.removeprefix("train-")): [
            value
            for line in read_jsonl(dumps[index])
            for value in line["advantages"] or []
            if value
        ]
        for index in chosen
    }


def _draw_histogram(dumps: Mapping[int, Sequence[float]], axes: Any) -> int:
    import numpy as np

    filled = {update: values for update, values in dumps.items() if values}
    if not filled:
        return 0
    every = np.concatenate([np.asarray(values) for values in filled.values()])
    edges = np.histogram_bin_edges(every, bins=_BINS)
    for update, values in filled.items():
        share = np.histogram(values, bins=edges)[0] / len(values)
        axes.stairs(share, edges, label=f"update {update}", linewidth=1.4)
    return len(filled)
