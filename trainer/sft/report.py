"""report.html of an SFT run: one file without scripts and external resources, with escaped text."""

from __future__ import annotations

from pathlib import Path

from scorekit.documents import read_json
from scorekit.net.masking import without_passwords
from scorekit.report.page import write_html
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.pages import draw_curves, read_run, read_text
from trainer.runs.stats import compare
from trainer.sft.stats import CURVES, TABLE


def write_report(run_dir: Path) -> Path:
    """Write the page into a run's folder and return its path. Raises UserError if it is no run."""
    updates, evals = read_run(run_dir)
    data_file = run_dir / "data.json"
    return write_html(
        run_dir / "report.html",
        "trainer/sft/report.html",
        title="Supervised fine-tuning",
        updates=len(updates),
        rows=compare(TABLE, evals[0], evals[-1]) if evals else [],
        last=evals[-1] if evals else {},
        curves=draw_curves(CURVES, updates, {DEFAULT_EVAL_SET: evals}),
        data=read_json(data_file) if data_file.is_file() else {},
        messages=read_text(run_dir / "messages.log"),
        config=without_passwords(read_text(run_dir / "config.yaml")),
    )
