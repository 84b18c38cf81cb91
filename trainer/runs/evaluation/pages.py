"""The pages of any task: report.html of a run, evaluation.html of a policy, comparison.html of two.

A page is one file, without scripts and external resources; every text in it is escaped. The
templates stand in this folder. They call macros of the task (`TaskPages`). The charts of a run are
SVG (`draw_curves`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.net.masking import without_passwords
from scorekit.paired import FEWEST, RESAMPLES, PairedStat, as_row
from scorekit.report.page import Filters, chart_image, write_html
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import Curve, StatSpec, compare

Line = dict[str, Any]
#: (title, examples); an example is a sample, or the two of two evaluations.
Examples = Sequence[tuple[str, Sequence[Any]]]
_FOLDER = "trainer/runs/evaluation"
Lines = Sequence[Mapping[str, Any]]
_SMOOTHING = 0.7  # weight of the past in the exponential mean that is drawn over the raw points
_DASHES = ("-", "--", "-.", ":")  # of the held-out sets


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPages:
    """Writes the pages of a task.

    macros: the template of its macros: `look` (style), `legend`, `asked` and `answered` (a sample),
    `explain` (of stats), `run_notes`, `set_details`, `evaluation_details`, `group`.
    units: what is held out, in the plural.
    answer: what a policy gives for one of them.
    filters, values: what the macros use besides.
    """

    macros: str
    units: str
    answer: str
    filters: Filters = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def write_run(
        self,
        folder: Path,
        updates: Sequence[Line],
        sets: Sequence[Mapping[str, Any]],
        **values: Any,
    ) -> Path:
        """Write report.html of a run.

        sets: `set_values` of each held-out set.
        """
        ends = (*updates[-1:], *(values_of_set["last"] for values_of_set in sets))
        return self._write(
            folder / "report.html",
            stopped=next((line["stopped"] for line in ends if line.get("stopped")), None),
            updates=len(updates),
            sets=sets,
            config=without_passwords(read_text(folder / "config.yaml")),
            **values,
        )

    def write_evaluation(
        self,
        path: Path,
        policy: str,
        stats: Mapping[str, Any],
        table: Sequence[StatSpec],
        examples: Examples,
        **values: Any,
    ) -> Path:
        """Write a page of an evaluation's stats and of some examples."""
        return self._write(
            path,
            "evaluation",
            policy=policy,
            stats=stats,
            rows=compare(table, stats, {}),
            examples=[(title, lines) for title, lines in examples if lines],
            **{"title": "Evaluation", **values},
        )

    def write_comparison(
        self,
        path: Path,
        names: tuple[str, str],
        groups: Mapping[str, Sequence[PairedStat]],
        examples: Examples,
    ) -> Path:
        """Write a page of the intervals of the differences, and of the largest changes."""
        return self._write(
            path,
            "comparison",
            title="Two policies",
            names=names,
            groups=[(name, [as_row(stat) for stat in stats]) for name, stats in groups.items()],
            resamples=RESAMPLES,
            fewest=FEWEST,
            examples=examples,
        )

    def _write(self, path: Path, template: str = "report", **values: Any) -> Path:
        values |= {"macros": self.macros, "units": self.units, "answer": self.answer, **self.values}
        return write_html(path, f"{_FOLDER}/{template}.html", self.filters, **values)


def read_run(folder: Path) -> tuple[list[Line], list[Line]]:
    """Return the lines of a run's log.jsonl and eval.jsonl. Raises UserError if it has neither."""
    updates, evals = read_jsonl(folder / "log.jsonl"), read_jsonl(folder / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{folder}: not a run (no log.jsonl, no eval.jsonl)")
    return updates, evals


def read_text(path: Path) -> str:
    """Return the text of a file of a run; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def first_and_last(
    folder: Path, evals: Sequence[Line], units: str, key_of: Callable[[Line], Any]
) -> tuple[list[Line], list[Line]]:
    """Return the samples of a run's first and last evaluation of a set.

    key_of: a sample's identity. Raises UserError if the two evaluations have different samples.
    """
    first, last = (read_jsonl(folder / evals[index]["completions"]) for index in (0, -1))
    if [key_of(line) for line in first] != [key_of(line) for line in last]:
        raise UserError(f"{folder}: its first and last evaluation have different {units}")
    return first, last


def set_values(
    name: str, evals: Sequence[Line], table: Sequence[StatSpec], examples: Examples
) -> dict[str, Any]:
    """Return what a run's page shows of a held-out set, before and after."""
    return {
        "name": "" if name == DEFAULT_EVAL_SET else name,
        "decides": evals[-1].get("decides"),
        "last": evals[-1],
        "rows": compare(table, evals[0], evals[-1]),
        "examples": examples,
    }


def group_table(
    stats: Sequence[StatSpec], old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the stats of each group before and after; where one is missing, there is a dash."""
    visible_stats = [replace(stat, hidden_at=()) for stat in stats]
    rows = [
        {
            "name": name,
            "samples": values["samples"],
            "stats": values,
            "cells": compare(visible_stats, values, new.get(name, {})),
        }
        for name, values in old.items()
    ]
    return {"titles": [stat.title for stat in visible_stats], "rows": rows}


def draw_curves(curves: Sequence[Curve], updates: Lines, evals: Mapping[str, Lines]) -> list[str]:
    """Return one chart for each curve that has points.

    evals: lines of eval.jsonl by the names of their sets.
    """
    charts = (
        chart_image(curve.title, "update", partial(_draw_curve, updates, evals, curve))
        for curve in curves
    )
    return [chart for chart in charts if chart is not None]


def _draw_curve(updates: Lines, evals: Mapping[str, Lines], curve: Curve, axes: Any) -> int:
    from matplotlib.ticker import MaxNLocator

    past = 0.0 if curve.sums else _SMOOTHING
    num_series = sum(_draw_series(axes, updates, key, past) for key in curve.keys)
    if curve.held_out is not None:
        num_series += sum(
            _draw_held_out(axes, lines, curve.held_out, name, dash)
            for (name, lines), dash in zip(evals.items(), cycle(_DASHES), strict=False)
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(key.endswith("_coverage") for key in curve.keys) and curve.keys:
        axes.set_ylim(0, 1.05)
    return num_series


def _draw_series(axes: Any, updates: Lines, key: str, past: float) -> bool:
    points = [(line["update"], line[key]) for line in updates if line.get(key) is not None]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    smooth: list[float] = []
    for value in values:
        smooth.append(past * smooth[-1] + (1 - past) * value if smooth else value)
    label = key.removesuffix("_mean")
    for prefix in ("spans_", "guard_", "cost/"):
        label = label.removeprefix(prefix)
    (line,) = axes.plot(steps, smooth, label=label.replace("_", " "), linewidth=1.6)
    axes.plot(steps, values, ".", color=line.get_color(), alpha=0.5, markersize=5)
    return True


def _draw_held_out(axes: Any, evals: Lines, key: str, name: str, dash: str) -> bool:
    points = [(line["update"], line[key]) for line in evals if line.get(key) is not None]
    if points:
        label = "held out" if name == DEFAULT_EVAL_SET else f"held out: {name}"
        axes.plot(*zip(*points, strict=True), f"o{dash}", color="black", label=label, markersize=4)
    return bool(points)
