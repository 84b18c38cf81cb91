"""The pictures of a run's report, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from scorekit.report.page import picture
from trainer.runs.config import THE_SET
from trainer.runs.figures import Curve
from trainer.runs.runlog import read_jsonl
from trainer.translation.evaluation.figures import curves

Lines = Sequence[Mapping[str, Any]]
_SMOOTHING = 0.7  # weight of the past in the exponential mean that is drawn over the raw points
_BINS = 40
_DASHES = ("-", "--", "-.", ":")  # of the held-out sets


def draw_run(folder: Path, updates: Lines, evals: Mapping[str, Lines]) -> list[str]:
    """One picture for each curve that has points, and the histogram of advantages. evals: lines of
    eval.jsonl by the names of their sets."""
    pictures = [
        picture(curve.title, "update", partial(_draw_curve, updates, evals, curve))
        for curve in curves()
    ]
    dumps = _some_advantages(folder)
    pictures.append(
        picture(
            "advantages (normalised, share of tokens)", "advantage", partial(_draw_histogram, dumps)
        )
    )
    return [drawn for drawn in pictures if drawn is not None]


def _draw_curve(updates: Lines, evals: Mapping[str, Lines], curve: Curve, axes: Any) -> int:
    from matplotlib.ticker import MaxNLocator

    drawn = sum(_draw_series(axes, updates, key) for key in curve.keys)
    if curve.held_out is not None:
        drawn += sum(
            _draw_held_out(axes, lines, curve.held_out, name, dash)
            for (name, lines), dash in zip(evals.items(), cycle(_DASHES), strict=False)
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(key.endswith("_coverage") for key in curve.keys) and curve.keys:
        axes.set_ylim(0, 1.05)
    return drawn


def _draw_series(axes: Any, updates: Lines, key: str) -> bool:
    points = [(line["update"], line[key]) for line in updates if line.get(key) is not None]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    smooth: list[float] = []
    for value in values:
        smooth.append(_SMOOTHING * smooth[-1] + (1 - _SMOOTHING) * value if smooth else value)
    label = key.removesuffix("_mean").removeprefix("spans_").removeprefix("guard_")
    (line,) = axes.plot(steps, smooth, label=label.replace("_", " "), linewidth=1.6)
    axes.plot(steps, values, ".", color=line.get_color(), alpha=0.5, markersize=5)
    return True


def _draw_held_out(axes: Any, evals: Lines, key: str, name: str, dash: str) -> bool:
    points = [(line["update"], line[key]) for line in evals if line.get(key) is not None]
    if points:
        label = "held out" if name == THE_SET else f"held out: {name}"
        axes.plot(*zip(*points, strict=True), f"o{dash}", color="black", label=label, markersize=4)
    return bool(points)


def _some_advantages(folder: Path) -> dict[int, list[float]]:
    """Of the first, the middle and the last update whose completions were dumped. A token with
    exactly 0 is one that was not learned from."""
    dumps = sorted((folder / "completions").glob("train-*.jsonl"))
    chosen = sorted({0, len(dumps) // 2, len(dumps) - 1}) if dumps else []
    return {
        int(dumps[place].stem.removeprefix("train-")): [
            value
            for line in read_jsonl(dumps[place])
            for value in line["advantages"] or []
            if value
        ]
        for place in chosen
    }


def _draw_histogram(dumps: Mapping[int, Sequence[float]], axes: Any) -> int:
    import numpy as np

    filled = {update: values for update, values in dumps.items() if values}
    if not filled:
        return 0
    every = np.concatenate([np.asarray(values) for values in filled.values()])
    edges = np.histogram_bin_edges(every, bins=_BINS)
    for update, values in filled.items():
        share = np.histogram(values, bins=edges)[0] / len(values)
        axes.stairs(share, edges, label=f"update {update}", linewidth=1.4)
    return len(filled)
