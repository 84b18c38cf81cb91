"""report.html of an SFT run: one file without scripts and external resources, with escaped text."""

from __future__ import annotations

import json
from pathlib import Path

from scorekit.report.page import write_html
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.curves import draw_curves
from trainer.runs.evaluation.pages import read_run, read_text
from trainer.runs.stats import compare
from trainer.sft.stats import CURVES, TABLE


def write_report(run_dir: Path) -> Path:
    """Write the page into a run's folder and return its path. Raises UserError if it is no run."""
    updates, evals = read_run(run_dir)
    return write_html(
        run_dir / "report.html",
        "trainer/sft/report.html",
        title="Supervised fine-tuning",
        updates=len(updates),
        rows=compare(TABLE, evals[0], evals[-1]) if evals else [],
        last=evals[-1] if evals else {},
        curves=draw_curves(CURVES, updates, {DEFAULT_EVAL_SET: evals}),
        data=json.loads(read_text(run_dir / "data.json") or "{}"),
        messages=read_text(run_dir / "messages.log"),
        config=read_text(run_dir / "config.yaml"),
    )
