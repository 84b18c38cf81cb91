"""Check where a run writes, for `scorekit check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.report.findings import Findings
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.run_log import check_run_dir, open_run_dir
from trainer.runs.trackers import check_trackers


def check_output_paths(findings: Findings, cfg: Any) -> None:
    """Check trackers and folder of a run; cfg: of any task."""
    findings.run_check("misc.trackers", _trackers, cfg)
    findings.run_check("misc.run_dir", _run_dir, cfg)


def _trackers(cfg: Any) -> tuple[None, str]:
    check_trackers(cfg.misc.trackers)
    return None, ", ".join(cfg.misc.trackers) or "none but log.jsonl"


def _run_dir(cfg: Any) -> tuple[None, str]:
    """Check that the folder is fit for a new run, or for resuming the one in it."""
    folder = Path(cfg.misc.run_dir)
    if folder.is_file():
        raise UserError(f"misc.run_dir: {folder} is a file")
    open_run_dir(cfg.misc)
    if any(folder.glob("checkpoints/step-*")) and not cfg.misc.overwrite:
        checkpoint = checkpoint_to_resume(cfg)
        done = read_state(checkpoint).update if checkpoint else 0
        return None, f"{folder}: has a run of {done} updates. Resume it with --resume"
    check_run_dir(cfg)
    return None, f"{folder}: can be written to"
