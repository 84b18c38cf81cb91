"""report.html of an SFT run: one file without scripts and external resources, with escaped text."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.page import STYLE
from trainer.runs.cli.curves import draw_curves
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import compare
from trainer.sft.stats import CURVES, TABLE


def write_report(run_dir: Path) -> Path:
    """Write the page into a run's folder and return its path. Raises UserError if it is no run."""
    updates, evals = read_jsonl(run_dir / "log.jsonl"), read_jsonl(run_dir / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{run_dir}: not a run (no log.jsonl, no eval.jsonl)")
    environment = Environment(
        loader=PackageLoader("trainer.sft", "."), autoescape=select_autoescape(["html"])
    )
    page = environment.get_template("report.html").render(
        style=Markup(STYLE),
        updates=len(updates),
        rows=compare(TABLE, evals[0], evals[-1]) if evals else [],
        last=evals[-1] if evals else {},
        curves=[Markup(svg) for svg in draw_curves(CURVES, updates, {DEFAULT_EVAL_SET: evals})],
        data=json.loads(_text(run_dir / "data.json") or "{}"),
        messages=_text(run_dir / "messages.log"),
        config=_text(run_dir / "config.yaml"),
    )
    path = run_dir / "report.html"
    write_atomic(path, page)
    return path


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
