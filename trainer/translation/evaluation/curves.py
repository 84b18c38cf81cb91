"""The charts of a run's report, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.report.page import chart_image
from trainer.runs.evaluation.pages import Lines, draw_curves
from trainer.runs.run_log import read_jsonl
from trainer.translation.evaluation.stats import curves

_BINS = 40


def draw_run(folder: Path, updates: Lines, evals: Mapping[str, Lines]) -> list[str]:
    """Return one chart for each curve that has points, and the histogram of advantages.

    evals: lines of eval.jsonl by the names of their sets.
    """
    histogram = chart_image(
        "advantages (normalized, share of tokens)",
        "advantage",
        partial(_draw_histogram, _sampled_advantages(folder)),
    )
    every = [line for lines in evals.values() for line in lines]
    return [
        *draw_curves(curves(*every), updates, evals),
        *([] if histogram is None else [histogram]),
    ]


def _sampled_advantages(folder: Path) -> dict[int, list[float]]:
    """Return the advantages of the first, middle and last update whose completions were dumped.

    A token with exactly 0 was not trained on.
    """
    dumps = sorted((folder / "completions").glob("train-*.jsonl"))
    chosen = sorted({0, len(dumps) // 2, len(dumps) - 1}) if dumps else []
    return {
        int(dumps[index].stem.removeprefix("train-")): [
            value
            for line in read_jsonl(dumps[index])
            for value in line["advantages"] or []
            if value
        ]
        for index in chosen
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
