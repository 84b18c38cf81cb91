"""Write rounds.html, the page of all rounds of a loop.

It is one file without scripts, and it loads nothing; all text in it is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.report.page import chart_image, write_html
from trainer.search.rounds.plan import LoopPlan
from trainer.search.rounds.summary import (
    SHOWN,
    RoundSummary,
    displayed_stats,
    rounds_table,
    summarize_round,
)
from trainer.search.steps.output import as_cell

PAGE = "rounds.html"


def rounds_of(plan: LoopPlan) -> list[RoundSummary]:
    """Return summaries of all rounds, also of those that have not started."""
    return [
        summarize_round(round_cfg, plan.folder(round_cfg), plan.training(round_cfg).reward)
        for round_cfg in plan.cfg.rounds
    ]


def write_page(plan: LoopPlan) -> Path:
    """Write the page of the current state and return its path."""
    rounds = rounds_of(plan)
    head, lines = rounds_table(plan.cfg, rounds)
    return write_html(
        plan.out / PAGE,
        "trainer/search/rounds/page.html",
        head=head,
        lines=lines,
        pictures=_charts(rounds),
        rounds=[(summary, _pages(summary, plan.out)) for summary in rounds],
        shown=SHOWN,
        cell=as_cell,
    )


def _pages(summary: RoundSummary, out: Path) -> dict[str, str]:
    """Return the path of each step's report relative to the page."""
    paths = {step: summary.folder / step / "report.html" for step in summary.steps}
    return {step: os.path.relpath(path, out) for step, path in paths.items() if path.is_file()}


def _charts(rounds: Sequence[RoundSummary]) -> list[str]:
    """Return charts of the held-out stats and of the rows that each round kept."""
    sets = dict.fromkeys(name for summary in rounds for name in summary.held_out)
    charts = [
        chart_image(f"{title} ({name})", "round", partial(_curve, rounds, compared, name, key))
        for name in sets
        for key, title, compared in displayed_stats(rounds)
        if key != "turns_mean"
    ]
    charts.append(chart_image("rows kept, by command", "rows", partial(_funnel, rounds)))
    return [chart for chart in charts if chart is not None]


def _curve(
    rounds: Sequence[RoundSummary], compared: Sequence[RoundSummary], name: str, key: str, axes: Any
) -> int:
    """Draw the values before and after each training; the line between two rounds is dotted."""
    positions, values = [], []
    for number, summary in enumerate(rounds):
        if summary not in compared:
            continue
        for position, stats in zip(
            (number, number + 0.6), summary.held_out.get(name, ()), strict=False
        ):
            if stats.get(key) is not None:
                positions.append(position)
                values.append(stats[key])
    if not positions:
        return 0
    axes.plot(positions, values, ":", color="C7", linewidth=1)
    for number in range(len(rounds)):
        of_round = [n for n, position in enumerate(positions) if number <= position < number + 1]
        axes.plot([positions[n] for n in of_round], [values[n] for n in of_round], "o-", color="C0")
    axes.set_xticks([n + 0.3 for n in range(len(rounds))], [summary.name for summary in rounds])
    return 1


def _funnel(rounds: Sequence[RoundSummary], axes: Any) -> int:
    bars = [
        (f"{summary.name}: {command}", counts["kept"], counts["rows"])
        for summary in rounds
        for command, counts in summary.counts.items()
    ]
    if not bars:
        return 0
    names, num_kept, rows = zip(*bars, strict=True)
    axes.barh(names, rows, color="0.85", label="of")
    axes.barh(names, num_kept, color="C0", label="kept")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    return 2
