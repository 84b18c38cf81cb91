"""One call of the command, and what a stage is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scorekit.errors import ScorekitError, UserError
from synth.config import SynthConfig
from synth.folder.stats import StageStats
from synth.folder.store import StageFolder


class Unfinished(ScorekitError):
    """Records are left open: their services failed. Exit code 3; `--resume` asks again."""

    exit_code = 3
    word = "unfinished"

    def __init__(self, stage: str, open_: Counter[str]) -> None:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(open_.items()))
        super().__init__(
            f"{stage}: {open_.total()} records are left open ({codes}): --resume asks again, "
            "--resume --give-up rejects what is still not answered"
        )
        self.stage = stage
        self.open = open_


@dataclass(slots=True)
class Context:
    """One call of the command.

    inputs: folder in which a stage finds the one before it, where its own has none (a dry run).
    limit: records of the input that are taken at most, over all shards.
    share: take every shard that nobody is at, not only this process's own, and wait for the others.
    left_open: by shard, 1 where a process of this call has left records open, and so do the others.
    give_up: reject what a service still does not answer, in place of leaving it open.
    advance: called with the number of records done, for a progress bar.
    tell: called with a line for the user.
    """

    cfg: SynthConfig
    out_dir: Path
    inputs: Path | None = None
    resume: bool = False
    overwrite: bool = False
    limit: int | None = None
    shard_id: int = 0
    num_shards: int = 1
    share: bool = False
    give_up: bool = False
    left_open: MutableSequence[int] | None = None
    advance: Callable[[int, int | None], None] = lambda done, total: None
    tell: Callable[[str], None] = lambda line: None
    stats: StageStats = field(default_factory=StageStats)

    def folder(self, stage: str) -> StageFolder:
        """What a stage of this run writes."""
        return StageFolder(self.out_dir, stage)

    def input_of(self, stage: Stage) -> StageFolder:
        """What the stage before it wrote. Raises UserError where there is nothing."""
        assert stage.after is not None
        own = self.folder(stage.after)
        if own.manifest() is None and self.inputs is not None:
            own = StageFolder(self.inputs, stage.after)
        if own.shards() is None:
            raise UserError(f"{own.path}: nothing there; run --stage {stage.after} first")
        return own


class Stage(Protocol):
    """What all stages have. `settings`: the part of the config that its output depends on."""

    @property
    def name(self) -> str: ...

    @property
    def after(self) -> str | None: ...

    def settings(self, cfg: SynthConfig) -> dict[str, Any]: ...
