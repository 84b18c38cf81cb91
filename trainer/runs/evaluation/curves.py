"""The charts of a run's page, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from scorekit.report.page import chart_image
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.stats import Curve

Lines = Sequence[Mapping[str, Any]]
_SMOOTHING = 0.7  # weight of the past in the exponential mean that is drawn over the raw points
_DASHES = ("-", "--", "-.", ":")  # of the held-out sets


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
