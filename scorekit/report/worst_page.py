"""The rows with the worst scores as an HTML page.

One file, without scripts or external resources; all texts in it are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from scorekit.report.page import write_html
from scorekit.report.render import as_html
from scorekit.report.worst import (
    ScoredRow,
    WorstRows,
    error_text,
    marked_spans,
    remarks,
    score_text,
)


def write_worst_page(path: Path, title: str, worst: WorstRows, rows: Iterable[ScoredRow]) -> Path:
    """Write the page, and return its path. rows: the worst ones, with their texts."""
    failed = [(row.name, error_text(row.results[worst.metric])) for row in worst.failed]
    return write_html(
        path,
        "scorekit/report/worst.html",
        title=title,
        worst=worst,
        rows=[_row_values(row) for row in rows],
        failed=failed,
        num_unlisted=worst.num_failed - len(failed),
    )


def _row_values(row: ScoredRow) -> dict[str, Any]:
    """Return what the template needs of a row."""
    lines = []
    for name, text in row.texts.items():
        spans_by_metric = marked_spans(name, row)
        if not spans_by_metric:
            lines.append((name, Markup(as_html(text, []))))
        for metric, spans in spans_by_metric.items():
            label = name if len(spans_by_metric) == 1 else f"{name}, {metric}"
            lines.append((label, Markup(as_html(text, spans))))
    return {
        "name": row.name,
        "system": row.system,
        "scores": [
            (metric, score_text(result), result["ok"]) for metric, result in row.results.items()
        ],
        "lines": lines,
        "remarks": list(remarks(row)),
    }
