"""The stats of an SFT run, and its report.html.

The page is one file without scripts and external resources, with escaped text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scorekit.documents import read_json
from scorekit.net.masking import without_passwords
from scorekit.report.page import write_html
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.pages import draw_curves, read_run, read_text
from trainer.runs.stats import Curve, Stats, StatSpec, compare

TABLE = (
    StatSpec(
        key="loss",
        title="loss per token",
        digits=4,
        better="lower",
        column="loss",
        form="8.4f",
        narrow=True,
        in_console=True,
    ),
    StatSpec(
        key="token_accuracy",
        title="likeliest token is the row's",
        better="higher",
        column="accuracy",
        form="8.3f",
        narrow=True,
        in_console=True,
    ),
    StatSpec(key="entropy", column="entropy", form="8.3f"),
    StatSpec(key="grad_norm", column="grad norm", form="9.3f"),
    StatSpec(key="learning_rate", column="rate", form="9.2e"),
    StatSpec(key="update_s", column="s", form="6.1f", narrow=True),
)
CURVES = (
    Curve.with_held_out("Loss per token", "loss"),
    Curve.with_held_out("Likeliest token is the row's", "token_accuracy"),
    Curve(title="Norm of the gradient", keys=("grad_norm",)),
)
#: Name of a stat in transformers and TRL -> our name, if it differs.
_NAMES = {"mean_token_accuracy": "token_accuracy", "num_tokens": "tokens_seen"}
#: Stats of the machine, or logged elsewhere.
_LEFT_OUT = ("epoch", "runtime", "samples_per_second", "steps_per_second", "step_time")


def compute_stats(logs: Mapping[str, Any]) -> Stats:
    """Return TRL's stats under our names; values that are not finite are None."""
    stats: Stats = {}
    for key, value in logs.items():
        name = key.removeprefix("eval_")
        if name not in _LEFT_OUT:
            is_number = isinstance(value, int | float) and math.isfinite(value)
            stats[_NAMES.get(name, name)] = value if is_number else None
    return stats


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
