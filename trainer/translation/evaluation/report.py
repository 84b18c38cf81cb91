"""The pages: report.html of a run, evaluation.html of a policy, comparison.html of two.

A page is one file, without scripts and external resources; every text in it is escaped.
trainer/runs/run_log.py and trainer/translation/dumps.py describe the files that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.page import STYLE
from scorekit.report.render import COLOURS, cut_segments, hint, visible
from scorekit.schemas import ErrorSpan
from trainer.runs.cli.paired import FEWEST, RESAMPLES, PairedStat, as_row
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import compare
from trainer.translation.evaluation.compare import changed_most
from trainer.translation.evaluation.curves import draw_run
from trainer.translation.evaluation.stats import (
    A_REWARD,
    CHRF,
    NO_REWARD,
    ranking,
    read_evaluations,
    severity_counts,
    table,
)

_MAX_EXAMPLES = 12  # examples of each kind


def write_report(
    run_dir: str | Path, title: str = "Training run", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` into a run's folder and return its path.

    notes: paragraphs for the top of the page.
    Raises UserError if the folder has no run.
    """
    folder = Path(run_dir)
    updates = read_jsonl(folder / "log.jsonl")
    evals = read_evaluations(folder)
    if not updates and not evals:
        raise UserError(f"{folder}: not a run (no log.jsonl, no eval.jsonl)")
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in evals:
        sets.setdefault(line.get("set", DEFAULT_EVAL_SET), []).append(line)
    lasts = (*updates[-1:], *(lines[-1] for lines in sets.values()))
    return _write(
        folder / "report.html",
        "report",
        title=title,
        notes=notes,
        stopped=next((line["stopped"] for line in lasts if line.get("stopped")), None),
        sets=[_set_values(folder, name, lines) for name, lines in sets.items()],
        curves=[Markup(svg) for svg in draw_run(folder, updates, sets)],
        config=_read_text(folder / "config.yaml"),
        updates=len(updates),
    )


def _set_values(folder: Path, name: str, evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the template for a set of held-out sources, before and after."""
    return {
        "name": "" if name == DEFAULT_EVAL_SET else name,
        "decides": evals[-1].get("decides"),
        "gaps": ", ".join(_gaps(evals)),
        "last": evals[-1],
        "rows": compare(table(*evals), evals[0], evals[-1]),
        "pairs": _pair_table(evals[0], evals[-1]),
        "examples": _pick_examples(folder, evals),
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
    kinds = (
        *_worst(lines),
        ("Without a score", failed),
        ("The first of the set", lines[:_MAX_EXAMPLES]),
    )
    return _write(
        path,
        "evaluation",
        policy=policy,
        figures=stats,
        rows=compare(table(stats), stats, {}),
        pairs=_pair_table(stats, stats),
        severity_rows=severity_counts(lines),
        examples=[{"title": title, "lines": chosen} for title, chosen in kinds if chosen],
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
    return _write(
        path,
        "comparison",
        first=names[0],
        second=names[1],
        groups=[
            {"name": name, "rows": [as_row(stat) for stat in stats]}
            for name, stats in groups.items()
        ],
        resamples=RESAMPLES,
        fewest=FEWEST,
        examples=changed_most(first, second, _MAX_EXAMPLES),
    )


def _write(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder."""
    environment = Environment(
        loader=PackageLoader("trainer.translation.evaluation", "."),
        autoescape=select_autoescape(["html"]),
    )
    environment.filters |= {"segments": _segments, "visible": visible, "scores": _scores}
    page = environment.get_template(f"{template}.html").render(style=Markup(STYLE), **values)
    write_atomic(path, page)
    return path


def _pair_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stats of each language pair before and after, for the template; None for one
    pair."""
    old, new = before.get("pairs") or {}, after.get("pairs") or {}
    if not old:
        return None
    all_values = [*old.values(), *new.values()]
    # if only some pairs have a stat, the others show a dash
    stats = [
        replace(stat, hidden_at=())
        for stat in table(before, after)
        if stat.by_group
        and not {pair_values.get(stat.key) for pair_values in all_values} <= {*stat.hidden_at}
    ]
    titles = [stat.title.removesuffix(NO_REWARD).removesuffix(A_REWARD) for stat in stats]
    rows = []
    for name, values in old.items():
        cells = []
        for stat, row in zip(stats, compare(stats, values, new.get(name, {})), strict=True):
            note = values.get("bleu_tokenize") if stat.key == "bleu" else None
            cells.append(
                {
                    "before": row.before,
                    "after": row.after,
                    "change": row.change,
                    "verdict": row.verdict,
                    "note": note,
                }
            )
        rows.append({"name": name, "samples": values["samples"], "cells": cells})
    return {"titles": titles, "rows": rows}


def _pick_examples(folder: Path, evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return examples before and after: largest improvements, largest losses, and the first
    ones."""
    if len(evals) < 2:
        return []
    before, after = (read_jsonl(folder / evals[i]["completions"]) for i in (0, -1))
    if len(before) != len(after):
        raise UserError(
            f"{folder}: {evals[0]['completions']} and {evals[-1]['completions']} differ in length"
        )
    kinds = [
        *changed_most(before, after, _MAX_EXAMPLES),
        ("The first of the set", list(zip(before, after, strict=True))[:_MAX_EXAMPLES]),
    ]
    return [{"title": title, "pairs": chosen} for title, chosen in kinds]


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


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
