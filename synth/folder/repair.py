"""What a damaged disk left of a run: which shards are to be made again, which answers are lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scorekit.errors import UserError
from synth.config import SynthConfig, answers_place
from synth.folder.answers import mend
from synth.folder.locks import held
from synth.folder.stats import STAGES, need_run
from synth.folder.store import StageFolder
from synth.stages.export import Export


def repair(cfg: SynthConfig) -> Iterator[str]:
    """Lines about each shard that is damaged, with the command that makes it again; then the file
    of answers is copied without what cannot be read. Raises UserError while a driver is at work,
    and where no stage was begun."""
    need_run(cfg.run.out_dir)
    folders = [StageFolder(cfg.run.out_dir, name) for name in STAGES]
    with held([(folder.lock(), False) for folder in folders], "mend it"):
        damaged = 0
        for folder in folders:
            for fault in _faults(folder):
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


def _faults(folder: StageFolder) -> Iterator[str]:
    """A line about each shard that is damaged."""
    try:
        shards = folder.shards() or 0
    except UserError as error:
        yield str(error)
        return
    if folder.name == Export.name:
        try:
            Export().verify(folder.out_dir)
        except UserError as error:
            yield str(error)
        return
    for index in range(shards):
        try:
            if folder.mark(index) is not None:
                folder.verify(index)
        except UserError as error:
            yield str(error)
