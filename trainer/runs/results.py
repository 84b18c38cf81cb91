"""Print the results of `scorekit train`, `evaluate` and `reward`; tables and columns of the stats.

Nothing here loads torch: `scorekit reward` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from scorekit.net.addresses import without_userinfo
from scorekit.paired import PairedStat, as_row
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.stats import StatSpec, compare

if TYPE_CHECKING:  # both load torch
    from trainer.runs.artifacts import Artifacts
    from trainer.runs.evaluation.files import EvaluationOutcome

_VERDICTS = {"better": "green", "worse": "red", "": ""}


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


def columns(table: Sequence[StatSpec]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the columns of an update, title -> (key, format), and those for a narrow terminal.

    `±` is the deviation of the column before it.
    """
    stats = [stat for stat in table if stat.column]
    narrow = [stat.column for stat in stats if stat.narrow]
    return {stat.column: (stat.key, stat.form) for stat in stats}, narrow


def evaluation_line(
    table: Sequence[StatSpec], update: int, stats: Mapping[str, Any], name: str = DEFAULT_EVAL_SET
) -> str:
    """Return the console line of an evaluation of a set.

    A mean that does not cover all samples has its coverage.
    """
    texts = []
    for stat in table:
        if stat.in_console:
            coverage = stats.get(stat.coverage, 1.0)
            share = "" if coverage in (None, 1.0) else f" (of {coverage:.0%})"
            value = stats.get(stat.key)
            text = "-" if value is None else f"{value:.3f}"
            texts.append(f"{stat.key.removesuffix('_mean')} {text}{share}")
    set_label = "" if name == DEFAULT_EVAL_SET else f" ({name})"
    return f"held out{set_label}, after update {update}: {', '.join(texts)}"


def comparison_table(
    table: Sequence[StatSpec], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    """Return two reports side by side, with the change."""
    result = Table("", *(Column(title, justify="right") for title in ("before", "after", "change")))
    for row in compare(table, before, after):
        result.add_row(row.title, row.before, row.after, Text(row.change, _VERDICTS[row.verdict]))
    return result


def paired_table(paired_stats: Sequence[PairedStat]) -> Table:
    """Return two policies side by side, with the interval of the difference."""
    titles = ("sources", "A", "B", "B - A", "95 % interval", "p(worse)")
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    result = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # in 80 columns
    for row in (as_row(stat) for stat in paired_stats):
        difference = Text(row.difference, _VERDICTS[row.verdict])
        result.add_row(
            row.title, row.sources, row.first, row.second, difference, row.interval, row.worse
        )
    return result


def report_table(table: Sequence[StatSpec], stats: Mapping[str, Any]) -> Table:
    """Return the stats of one report."""
    result = Table("", Column("value", justify="right"))
    for row in compare(table, stats, {}):
        result.add_row(row.title, row.before)
    return result


def print_reward(words: Iterable[str], data: dict[str, Any]) -> None:
    """Print lines of comment, and the data as YAML without the passwords of its URLs."""
    for line in words:
        typer.echo(f"# {without_userinfo(line)}")
    if data:
        text = yaml.safe_dump(without_userinfo(data), sort_keys=False, allow_unicode=True)
        typer.echo(text, nl=False)
