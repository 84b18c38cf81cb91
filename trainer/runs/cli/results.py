"""Print the results of `scorekit train` and `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from trainer.runs.artifacts import Artifacts
from trainer.runs.cli.tables import paired_table, report_table
from trainer.runs.evaluation.files import EvaluationOutcome
from trainer.runs.stats import StatSpec


def print_results(
    artifacts: Artifacts,
    best_by: str,
    table_of: Callable[[Any, Any], Table],
    write_report: Callable[[Path], Path],
) -> int:
    """Print the first and last evaluations of a run, its page and policy; return the exit code.

    best_by: the evaluation set that the best checkpoint is chosen by.
    table_of: returns the table of the first and the last report of a set.
    """
    if not artifacts.is_main:
        return 0  # torchrun ends all processes with the first that fails; the main one still prints
    for name, reports in artifacts.sets.items():
        if not reports:  # the run was stopped before the first
            continue
        if len(artifacts.sets) > 1:
            best = " (the best checkpoint is chosen by it)" if name == best_by else ""
            typer.echo(f"set: {name}{best}")
        Console().print(table_of(reports[0][1], reports[-1][1]))
    if artifacts.updates or any(artifacts.sets.values()):
        typer.echo(f"report: {write_report(artifacts.run_dir)}")
    typer.echo(f"policy: {artifacts.checkpoint or 'unchanged: no update was done'}")
    if artifacts.stopped:
        typer.echo(f"stopped: {artifacts.stopped}", err=True)
    return artifacts.exit_code


def print_evaluation(
    outcome: EvaluationOutcome,
    rows: Sequence[StatSpec],
    all_heading: str,
    left_out: str | None = None,
) -> None:
    """Print the results for one set, and the comparison with another policy if there is one.

    rows: the statistics to show.
    all_heading: stands above the comparison of all samples; "" for no heading.
    left_out: groups whose name begins so stand on the page only, as there may be many.
    """
    Console().print(report_table(rows, outcome.evaluation.stats))
    typer.echo(f"report: {outcome.page}")
    if outcome.earlier is None or outcome.groups is None:
        return
    typer.echo(f"A: {outcome.earlier.policy}\nB: {outcome.evaluation.policy}")
    for name, paired_stats in outcome.groups.items():
        if left_out is not None and name.startswith(left_out):
            continue
        if heading := all_heading if name == "all" else name:
            typer.echo(heading)
        Console().print(paired_table(paired_stats))
    typer.echo(f"comparison: {outcome.comparison}")
