"""report.html of a run: figures before and after, curves, translations with their spans marked.

Reads the folder that trainer/runlog.py describes. The page is one file, with no script and nothing
fetched from elsewhere; every text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.page import STYLE, picture
from scorekit.render import cut_segments, visible
from scorekit.schemas import ErrorSpan
from trainer.figures import compare
from trainer.runlog import read_jsonl

#: Curves: title, keys of log.jsonl, key of eval.jsonl drawn beside them (or None).
CURVES: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    ("MetricX score (lower is better)", ("metricx_score_mean",), "metricx_score_mean"),
    ("xCOMET score", ("xcomet_score_mean",), "xcomet_score_mean"),
    (
        "error spans a segment",
        ("spans_MINOR_mean", "spans_MAJOR_mean", "spans_CRITICAL_mean"),
        "spans_mean",
    ),
    ("held-out chrF", (), "chrf"),
    ("completion length (tokens)", ("completion_length_mean",), "completion_length_mean"),
    ("token reward of spans", ("token_rewards_mean",), None),
    ("KL to the reference", ("kl_ref",), None),
    ("policy loss", ("policy_loss",), None),
)
_SMOOTHING = 0.7  # weight of the past in the exponential mean that is drawn over the raw points
_SHOWN = 12  # examples of each kind


def write_report(
    run_dir: str | Path, title: str = "Training run", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` into a run's folder and return its path.

    notes: paragraphs for the top of the page. Raises UserError where no run stands in the folder.
    """
    folder = Path(run_dir)
    updates = read_jsonl(folder / "log.jsonl")
    evals = read_jsonl(folder / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{folder}: no run here (no log.jsonl, no eval.jsonl)")
    environment = Environment(
        loader=PackageLoader("trainer", "."), autoescape=select_autoescape(["html"])
    )
    environment.filters |= {"segments": _segments, "visible": visible}
    page = environment.get_template("report.html").render(
        title=title,
        style=Markup(STYLE),
        notes=notes,
        evals=evals,
        rows=compare(evals[0], evals[-1]) if evals else [],
        curves=[Markup(svg) for svg in _draw_curves(updates, evals)],
        examples=_pick_examples(folder, evals),
        config=_read_text(folder / "config.yaml"),
        updates=len(updates),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _draw_curves(updates: list[dict[str, Any]], evals: list[dict[str, Any]]) -> list[str]:
    """SVG pictures, one a curve that has points."""
    pictures = [
        picture(title, "update", partial(_draw_curve, updates, evals, keys, eval_key))
        for title, keys, eval_key in CURVES
    ]
    return [drawn for drawn in pictures if drawn is not None]


def _draw_curve(
    updates: list[dict[str, Any]], evals: list[dict[str, Any]],
    keys: Sequence[str], eval_key: str | None, axes: Any,
) -> int:  # fmt: skip
    from matplotlib.ticker import MaxNLocator

    drawn = [_draw_series(axes, updates, key) for key in keys]
    if eval_key is not None:
        drawn.append(_draw_held_out(axes, evals, eval_key))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return len(drawn) if any(drawn) else 0


def _draw_series(axes: Any, updates: list[dict[str, Any]], key: str) -> bool:
    points = [(line["update"], line[key]) for line in updates if line.get(key) is not None]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    smooth: list[float] = []
    for value in values:
        smooth.append(_SMOOTHING * smooth[-1] + (1 - _SMOOTHING) * value if smooth else value)
    label = key.removesuffix("_mean").removeprefix("spans_").replace("_", " ")
    (line,) = axes.plot(steps, smooth, label=label, linewidth=1.6)
    axes.plot(steps, values, ".", color=line.get_color(), alpha=0.35, markersize=4)
    return True


def _draw_held_out(axes: Any, evals: list[dict[str, Any]], key: str) -> bool:
    points = [(line["update"], line[key]) for line in evals if line.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color="black", label="held out", markersize=4)
    return bool(points)


def _pick_examples(folder: Path, evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same sources before and after: what improved most, what worsened most, and the first."""
    if len(evals) < 2:
        return []
    before, after = (read_jsonl(folder / evals[i]["completions"]) for i in (0, -1))
    if len(before) != len(after):
        raise UserError(
            f"{folder}: {evals[0]['completions']} and {evals[-1]['completions']} differ in length"
        )
    pairs = list(zip(before, after, strict=True))
    changes = [
        (a["metricx_score"] - b["metricx_score"], b, a)
        for b, a in pairs
        if b["metricx_score"] is not None and a["metricx_score"] is not None
    ]
    changes.sort(key=lambda change: change[0])
    kinds = (
        ("Improved most, says MetricX", [(b, a) for c, b, a in changes[:_SHOWN] if c < 0]),
        ("Worsened most, says MetricX", [(b, a) for c, b, a in changes[::-1][:_SHOWN] if c > 0]),
        ("The first of the set", pairs[:_SHOWN]),
    )
    return [{"title": title, "pairs": chosen} for title, chosen in kinds if chosen]


def _segments(line: dict[str, Any]) -> list[dict[str, str]]:
    """For the template: text, class and tooltip of each stretch of a translation."""
    spans = [ErrorSpan.model_validate(span) for span in line["error_spans"] or []]
    return [
        {
            "text": segment.text,
            "kind": segment.span.severity.lower() if segment.span else "",
            "hint": f"{segment.span.severity} {segment.span.confidence:.2f}"
            if segment.span
            else "",
        }
        for segment in cut_segments(line["mt"], spans)
    ]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
