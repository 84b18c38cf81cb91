"""The results of a run: its artifacts, and whether there is anything left to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.config import RunConfig
from trainer.runs.run_log import read_jsonl
from trainer.runs.stops import StopRules

log = logging.getLogger(__name__)
#: (update, the task's report of the evaluation after it).
Reports = list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The results of a run.

    checkpoint: the newest; None if the run ended before there was one.
    updates: lines of log.jsonl.
    sets: evaluation set -> (update, report), the first from before training.
    reports: those of the set that the best checkpoint is chosen by.
    stopped: the reason why the run ended before its last update; None: it did not.
    is_main: whether this process writes the run's files.
    exit_code: of the command.
    """

    run_dir: Path
    checkpoint: Path | None
    updates: list[dict[str, Any]]
    reports: Reports
    sets: dict[str, Reports]
    stopped: str | None = None
    is_main: bool = True
    exit_code: int = 0


def finished_artifacts(
    cfg: RunConfig, checkpoint: Path, sets: Mapping[str, Reports], num_updates: int | None = None
) -> Artifacts | None:
    """Return the artifacts of a run that has no update left to do; None if it has.

    sets: its evaluations.
    num_updates: of the run; None: those of the config.
    """
    folder, done = Path(cfg.misc.run_dir), read_state(checkpoint).update
    updates = [line for line in read_jsonl(folder / "log.jsonl") if line["update"] <= done]
    deciding_reports = [
        (update, report) for update, report in sets.get(cfg.best_by, []) if update <= done
    ]
    stop_reason = StopRules(cfg.stop, updates, deciding_reports).reason
    # If a set was evaluated before training and not at the end, the run was interrupted.
    evaluated = all(done in dict(reports) for reports in sets.values())
    if (done < (num_updates or cfg.rl.num_updates) and stop_reason is None) or not evaluated:
        return None
    if stop_reason is None:
        log.warning("%s has its %d updates. Raise rl.num_updates to continue.", folder, done)
    code = 0 if stop_reason is None else 1
    decide = sets.get(cfg.best_by, [])
    return Artifacts(folder, checkpoint, updates, decide, dict(sets), stop_reason, exit_code=code)
