"""What a damaged disk left of a run: which shards are to be made again, which answers are lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scorekit.errors import UserError
from synth.config import SynthConfig, answers_place
from synth.context import Stage
from synth.folder.answers import mend
from synth.folder.locks import held
from synth.folder.places import need_run
from synth.folder.store import StageFolder
from synth.stages.table import ORDER


def repair(cfg: SynthConfig) -> Iterator[str]:
    """Lines about each shard that is damaged, with the command that makes it again; then the file
    of answers is copied without what cannot be read. Raises UserError while a driver is at work,
    and where no stage was begun."""
    need_run(cfg.run.out_dir)
    folders = {stage: StageFolder(cfg.run.out_dir, stage.name) for stage in ORDER}
    with held([(folder.lock(), False) for folder in folders.values()], "mend it"):
        damaged = 0
        for stage, folder in folders.items():
            for fault in _faults(stage, folder):
                damaged += 1
                yield fault
        yield f"{damaged} damaged shards"
        place = answers_place(cfg)
        if "://" not in place and Path(place).exists():
            kept, lost = mend(Path(place))
            told = f"{place}: {kept} answers kept"
            if lost is not None:
                told += (
                    f"; {lost} rows cannot be read, nor what stood on pages that are none any "
                    f"more: they are asked for again (the old file is {place}.damaged)"
                )
            yield told


def _faults(stage: Stage, folder: StageFolder) -> Iterator[str]:
    """A line about each shard that is damaged, or about the stage as a whole."""
    try:
        folder.shards()
    except UserError as error:
        yield str(error)
        return
    yield from stage.faults(folder)
