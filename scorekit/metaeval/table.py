"""Print the statistics in the terminal."""

from __future__ import annotations

from scorekit.metaeval import agreement, spans
from scorekit.metaeval.evaluate import MetaEvaluation, MetricStats

#: Short enough for the first column of a terminal.
_SHORT = {
    "kendall": "tau-b, all rows",
    "kendall_item": "tau-b by segment",
    "acc_eq": "acc_eq",
    "pearson": "Pearson",
    "system_accuracy": "systems: accuracy",
    "system_pearson": "systems: Pearson",
    "chars_precision": "characters: P",
    "chars_recall": "characters: R",
    "chars_f1": "characters: F1",
    "mpp_precision": "MPP: P",
    "mpp_recall": "MPP: R",
    "mpp_f1": "MPP: F1",
}

#: Columns of a terminal that the first column takes, and each of the others.
_FIRST, _EACH = 21, 15


def print_tables(result: MetaEvaluation) -> None:
    """Print tables of agreement and of spans: a column per metric, intervals below each value."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(head(result)))
    num_columns = max(1, (console.width - _FIRST) // _EACH)
    for title, names in (("agreement", agreement.STATS), ("spans", spans.STATS)):
        metrics = [
            metric for metric in result.metrics if any(name in metric.values for name in names)
        ]
        for first in range(0, len(metrics), num_columns):
            table = Table("", title=title, show_lines=True)
            shown_metrics = metrics[first : first + num_columns]
            for metric in shown_metrics:
                table.add_column(Text(metric.name), justify="right", max_width=_EACH - 3)
            rows = [
                metric.scored if title == "agreement" else metric.span_rows
                for metric in shown_metrics
            ]
            counts = (
                f"{count:,} of\n{metric.asked:,}"
                for count, metric in zip(rows, shown_metrics, strict=True)
            )
            table.add_row("scored", *counts)
            for name in names:
                table.add_row(_SHORT[name], *(cell(metric, name, "\n") for metric in shown_metrics))
            console.print(table)
    for note in notes(result):
        console.print(Text(note))


def head(result: MetaEvaluation) -> str:
    """Return the line about the data of the statistics."""
    return (
        f"{result.rows:,} translations that all have scored (of {result.judged:,}), "
        f"{result.segments:,} segments, {result.systems:,} systems"
    )


def notes(result: MetaEvaluation) -> list[str]:
    """Return the lines below the statistics."""
    lines = [
        f"Below a figure: 95 % of {result.draws:,} resamples of the segments, then of the systems. "
        "*: above the length-only metric in 97.5 % of both."
    ]
    for metric in result.metrics:
        if metric.failed:
            reasons = ", ".join(
                f"{type} {count:,}" for type, count in sorted(metric.failed.items())
            )
            lines.append(f"{metric.name}: no score of {metric.asked - metric.scored:,} ({reasons})")
        if metric.truncated:
            lines.append(f"{metric.name}: {metric.truncated:,} texts were not read to their end")
        if metric.repeated:
            lines.append(
                f"{metric.name}: {metric.repeated:,} equal rows of a translation count once"
            )
    return lines + result.notes


def cell(metric: MetricStats, name: str, separator: str) -> str:
    """Return a statistic with its intervals; – if it is not defined."""
    if name not in metric.values:
        return ""
    value = metric.values[name]
    if value is None:
        return "–"
    parts = [f"{value:.3f}" + ("*" if name in metric.beyond else "")]
    for interval in metric.intervals[name].values():
        parts.append("–" if interval is None else f"{interval[0]:.2f}..{interval[1]:.2f}")
    return separator.join(parts)
