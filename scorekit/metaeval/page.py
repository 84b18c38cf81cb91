"""Show the statistics, as tables in the terminal and as a page.

report.html has charts, and translations where metric and people disagree. It is one file, without
scripts or external resources; all texts in it are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from scorekit.metaeval import agreement, spans
from scorekit.metaeval.evaluate import MetaEvaluation, MetricStats
from scorekit.metaeval.judgements import JudgedTranslation, Span
from scorekit.metaeval.metrics import MetricScores
from scorekit.report.page import chart_image, write_html
from scorekit.report.render import as_html, visible
from scorekit.schemas import ErrorSpan

#: Number of examples of each kind per metric.
_EXAMPLES = 4
#: Longest name in a chart.
_NAME = 18
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


def write_page(
    path: Path,
    result: MetaEvaluation,
    translations: Sequence[JudgedTranslation],
    scores: Sequence[MetricScores],
    title: str,
) -> None:
    """Write the page."""
    with_spans = [metric for metric in result.metrics if metric.span_rows]
    write_html(
        path,
        "scorekit/metaeval/page.html",
        title=title,
        head=head(result),
        notes=notes(result),
        metrics=result.metrics,
        agreement=agreement.STATS,
        spans=spans.STATS,
        with_spans=with_spans,
        cell=cell,
        pictures=_charts(result, with_spans),
        groups={by: _group(with_spans, by) for by in ("severity", "length", "translation")},
        examples=[
            (metric.name, _examples(translations, metric)) for metric in scores if metric.has_spans
        ],
    )


def _charts(result: MetaEvaluation, with_spans: Sequence[MetricStats]) -> list[str]:
    charts = [
        chart_image(title, "with 95 % over segments", partial(_bars, result.metrics, name))
        for name, title in agreement.STATS.items()
    ]
    charts += [
        chart_image(spans.STATS[name], "with 95 % over segments", partial(_bars, with_spans, name))
        for name in ("chars_f1", "mpp_f1")
    ]
    charts += [
        chart_image(
            f"{visible(metric.name)} by system",
            "people's mean score",
            partial(_systems, result, metric),
        )
        for metric in result.metrics
        if metric.system_scores
        and not (metric.is_baseline and metric.values["system_pearson"] is None)
    ]
    return [chart for chart in charts if chart is not None]


def _bars(metrics: Sequence[MetricStats], name: str, axes: Any) -> int:
    """Draw one statistic of each metric; baselines are gray."""
    defined = [metric for metric in reversed(metrics) if metric.values.get(name) is not None]
    for position, metric in enumerate(defined):
        value = metric.values[name]
        assert value is not None
        low, high = metric.intervals[name]["segments"] or (value, value)
        axes.barh(position, value, color="#b8b8c0" if metric.is_baseline else "#4a76b8", height=0.6)
        axes.plot((low, high), (position, position), color="#1c1c1e", linewidth=1.2)
    axes.set_yticks(range(len(defined)), [_short(metric.name) for metric in defined])
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(0, color="#1c1c1e", linewidth=0.8)
    return 1 if defined else 0


def _systems(result: MetaEvaluation, metric: MetricStats, axes: Any) -> int:
    """Draw one point per system."""
    for system, human in result.human.items():
        axes.plot(human, metric.system_scores[system], "o", color="#4a76b8", markersize=4)
        axes.annotate(
            _short(system), (human, metric.system_scores[system]), fontsize=5.5, xytext=(3, 2),
            textcoords="offset points",
        )  # fmt: skip
    axes.margins(0.14)
    axes.set_ylabel("its mean score")
    return 1


def _short(name: str) -> str:
    name = visible(name)
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _group(metrics: Sequence[MetricStats], by: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return (name of the group, [(metric, its statistics)])."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for metric in metrics:
        for group in metric.groups:
            if group["by"] == by:
                groups.setdefault(group["name"], []).append((metric.name, group))
    if by == "severity":
        return list(groups.items())
    return sorted(groups.items(), key=lambda item: int(item[0].rstrip("+").split("-")[0]))


def _examples(
    translations: Sequence[JudgedTranslation], metric: MetricScores
) -> list[dict[str, Any]]:
    """Return examples of errors that only people mark, and that only the metric marks."""
    missed: list[tuple[int, dict[str, Any]]] = []
    invented: list[tuple[int, dict[str, Any]]] = []
    for translation, predicted, score in zip(
        translations, metric.spans, metric.scores, strict=True
    ):
        rating = next((r for r in translation.ratings if r.spans is not None), None)
        if predicted is None or rating is None or rating.spans is None:
            continue
        gold_chars, predicted_chars = _characters(rating.spans), _characters(predicted)
        entry = {"of": translation, "score": score, "people": rating.spans, "metric": predicted}
        missed.append((0 if gold_chars & predicted_chars else len(gold_chars), entry))
        invented.append((0 if gold_chars else len(predicted_chars), entry))
    lines = []
    for kind, ranked in (("people mark", missed), ("only the metric marks", invented)):
        best = sorted(ranked, key=lambda item: -item[0])[:_EXAMPLES]
        lines += [_render_example(kind, entry) for size, entry in best if size]
    return lines


def _render_example(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    translation = entry["of"]
    return {
        "kind": kind,
        "src": translation.src,
        "system": translation.system,
        "human": translation.score,
        "score": entry["score"],
        "people": Markup(as_html(translation.mt, _wire(entry["people"]))),
        "metric": Markup(as_html(translation.mt, _wire(entry["metric"]))),
    }


def _characters(marked: Sequence[Span]) -> set[int]:
    return {index for span in marked for index in range(span.start, span.end)}


def _wire(marked: Sequence[Span]) -> list[ErrorSpan]:
    return [ErrorSpan(start=s.start, end=s.end, severity=s.severity[:40] or "?") for s in marked]


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
