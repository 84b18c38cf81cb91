"""The command `trainer roleplay calibrate`, and its page: both distributions of each use, with the
anchors between them."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.report.page import chart_image, write_html
from trainer.roleplay.calibration import USES, Anchors, Calibration, fit
from trainer.roleplay.config_data import RoleplayData
from trainer.roleplay.data import load_turns
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import embedder_of, reach


def calibrate(cfg: RewardConfig, source: str, data: RoleplayData, out: Path, seed: int) -> None:
    """Fit a calibration, write the file and its page (.html), and print the table.

    For a folder of weights a server is started; its log is next to the file. Raises UserError.
    """
    turns = load_turns(source, data)
    running_server = embedder_of(cfg, out.with_suffix(".embedder.log"))
    with running_server as server, closing(reach(cfg, server)) as embedder:
        try:
            calibration = fit(embedder, turns, rows=cfg.calibration_rows, seed=seed)
        except (ServiceUnreachable, RequestError, SampleError) as error:
            raise UserError(f"--embedding-model: {error}") from None
    calibration.write(out)
    page = out.with_suffix(".html")
    num_sampled = min(cfg.calibration_rows, len(turns))
    write_page(page, calibration, f"{num_sampled:,} of {len(turns):,} turns of {source}")
    table = Table("", "scores 0 at", "scores 1 at", "true / shuffled pairs", "separation")
    for use in USES:
        table.add_row(*rows_of(use, calibration.anchors(use)))
    console = Console()
    console.print(table)
    console.print(f"written: {out}, {page}", highlight=False, soft_wrap=True)


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
        "trainer/roleplay/calibrate.html",
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
