"""What a run leaves: its artifacts, and whether there is anything left to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.config import RunConfig
from trainer.runs.runlog import read_jsonl
from trainer.runs.stops import StopRules

log = logging.getLogger(__name__)
#: (update, what the task says of the evaluation behind it).
Reports = list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Artifacts:
    """checkpoint: the newest; None where the run ended before there was one. updates: lines of
    log.jsonl. sets: evaluation set -> (update, report), the first from before training; reports:
    those of the set that the best checkpoint is chosen by.
    stopped: why the run ended before its last update; None: it did not.
    is_main: whether this process writes the run's files. exit_code: of the command."""

    run_dir: Path
    checkpoint: Path | None
    updates: list[dict[str, Any]]
    reports: Reports
    sets: dict[str, Reports]
    stopped: str | None = None
    is_main: bool = True
    exit_code: int = 0

    def say_end(self) -> int:
        """Where the policy is, and why the run ended early; the command's exit code."""
        typer.echo(f"policy: {self.checkpoint or 'as it was: no update was done'}")
        if self.stopped:
            typer.echo(f"stopped: {self.stopped}", err=True)
        return self.exit_code


def ended_before(cfg: RunConfig, checkpoint: Path, sets: Mapping[str, Reports]) -> Artifacts | None:
    """What a run left that has no update to do; None where it has. sets: its evaluations."""
    folder, done = Path(cfg.misc.run_dir), read_state(checkpoint).update
    updates = [line for line in read_jsonl(folder / "log.jsonl") if line["update"] <= done]
    known = [(at, of) for at, of in sets.get(cfg.best_by, []) if at <= done]
    stopped = StopRules(cfg.stop, updates, known).reason
    # Where one was evaluated before training and not at the end, the run was asked to leave.
    evaluated = all(done in dict(reports) for reports in sets.values())
    if (done < cfg.rl.num_updates and stopped is None) or not evaluated:
        return None
    if stopped is None:
        log.warning("%s has its %d updates: raise rl.num_updates to go on", folder, done)
    code = 0 if stopped is None else 1
    decide = sets.get(cfg.best_by, [])
    return Artifacts(folder, checkpoint, updates, decide, dict(sets), stopped, exit_code=code)
