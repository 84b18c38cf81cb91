"""The page of a calibration: both distributions of each use, with the anchors between them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from scorekit.report.page import chart_image, write_html
from trainer.roleplay.calibration.anchors import USES, Anchors, Calibration

#: The compared pairs: (true, false).
PAIRS = {
    "grounded": ("a user turn and its reference", "user turns and references, shuffled"),
    "reference": ("adjacent references of a character", "references, shuffled"),
}


def write_page(path: Path, calibration: Calibration, data: str) -> None:
    """Write the page.

    data: a description of the data that it was fitted on.
    """
    charts = [
        chart_image(use, "cosine", partial(_draw, anchors))
        for use in USES
        if (anchors := calibration.anchors(use)).false_cosines
    ]
    write_html(
        path,
        "trainer/roleplay/calibration/page.html",
        calibration=calibration,
        data=data,
        rows=[rows_of(use, calibration.anchors(use)) for use in USES],
        pictures=charts,
        pairs=PAIRS,
    )


def rows_of(use: str, anchors: Anchors) -> list[str]:
    """Return a row of the table: use, low, high, pairs, separation."""
    separation = "–" if anchors.separation is None else f"{anchors.separation:.3f}"
    pairs = f"{anchors.true_pairs:,} / {anchors.false_pairs:,}"
    return [use, f"{anchors.low:.3f}", f"{anchors.high:.3f}", pairs, separation]


def _draw(anchors: Anchors, axes: Any) -> int:
    """Draw shares of pairs by cosine, with the anchors as vertical lines."""
    num_series = 0
    for label, counts in (("true", anchors.true_cosines), ("shuffled", anchors.false_cosines)):
        total = sum(counts)
        if not total:
            continue
        width = 2 / len(counts)
        edges = [-1 + width * k for k in range(len(counts) + 1)]
        axes.stairs([count / total for count in counts], edges, label=label, fill=True, alpha=0.45)
        num_series += 1
    axes.axvline(anchors.low, color="black", linestyle=":", label="scores 0")
    axes.axvline(anchors.high, color="black", linestyle="--", label="scores 1")
    axes.set_ylabel("share of pairs")
    return num_series + 1
