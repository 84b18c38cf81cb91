"""Find damaged shards of a run, and repair its answer cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scorekit.errors import UserError
from scorekit.locks import hold_locks
from scorekit.paid.repair import repaired_lines
from synth.config import SynthConfig, answers_place
from synth.execution.stage import Stage
from synth.location import need_run
from synth.stages.table import ORDER
from synth.storage.store import StageFolder


def repair(cfg: SynthConfig) -> Iterator[str]:
    """Yield a line for each damaged shard with its repair command, then repair the answers.

    Raises UserError while a driver works, and if no stage was started."""
    need_run(cfg.run.out_dir)
    folders = {stage: StageFolder(cfg.run.out_dir, stage.name) for stage in ORDER}
    with hold_locks([(folder.lock(), False) for folder in folders.values()], "repair it"):
        damaged = 0
        for stage, folder in folders.items():
            for error in _errors(stage, folder):
                damaged += 1
                yield error
        yield f"{damaged} damaged shards"
        answers_location = answers_place(cfg)
        if "://" not in answers_location and Path(answers_location).exists():
            yield from repaired_lines(Path(answers_location))


def _errors(stage: Stage, folder: StageFolder) -> Iterator[str]:
    """Yield a line for each damaged shard, or for the stage."""
    try:
        yield from stage.errors(folder)
    except UserError as error:
        yield str(error)
