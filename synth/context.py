"""One call of the command, and what a stage states of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scorekit.errors import ScorekitError, UserError
from synth.config import SynthConfig
from synth.folder.distributions import Drawn, Found
from synth.folder.stats import StageStats
from synth.folder.store import Record, StageFolder
from synth.stages.cost import Cost, Sizes


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
        name = stage.after.name
        own = self.folder(name)
        if own.manifest() is None and self.inputs is not None:
            own = StageFolder(self.inputs, name)
        if own.shards() is None:
            raise UserError(f"{own.path}: nothing there; run --stage {name} first")
        return own


class Stage(ABC):
    """A stage, in a file of its own. What stands here with a default, it need not state.

    name: as in the command, in `stages/NAME/` and in every table. other_names: that the command
        takes, too.
    view: the file of the run that shows the records which it lets through; None: there is none.
    outputs: what else it leaves in the folder of the run.
    has_shards: its records stand in shards, which `show` prints.
    shows_rejected: it rejects for what it sees in a translation: the report shows a few of them.
    drawn: the pictures of the report that its figures are drawn into.
    after: the stage before it in the table; None for the first.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[str | None] = None
    outputs: ClassVar[tuple[str, ...]] = ()
    has_shards: ClassVar[bool] = True
    shows_rejected: ClassVar[bool] = False
    drawn: ClassVar[tuple[Drawn, ...]] = ()

    def __init__(self, after: Stage | None = None) -> None:
        self.after = after

    @property
    def leaves(self) -> tuple[str, ...]:
        """All that it leaves in the folder of the run beside `stages/NAME/`."""
        return self.outputs if self.view is None else (self.view, *self.outputs)

    @property
    def before(self) -> tuple[Stage, ...]:
        """All stages before it, in their order."""
        return () if self.after is None else (*self.after.before, self.after)

    @abstractmethod
    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """The part of the config that its output depends on."""

    def cost(self, run: Sizes) -> Cost:
        """What it needs when every source goes all the way through."""
        return Cost(self.name)

    def figures(self, cfg: SynthConfig, records: Iterable[Record]) -> Found:
        """How its records are spread, by name, for stats.json and the report: read in one pass, in
        little memory."""
        return {}

    def faults(self, folder: StageFolder) -> Iterator[str]:
        """A line about each shard that is damaged, with the command that makes it again."""
        for index in range(folder.shards() or 0):
            try:
                if folder.mark(index) is not None:
                    folder.verify(index)
            except UserError as error:
                yield str(error)

    def finish(self, ctx: Context) -> None:
        """What is to be done when all of its shards are."""
        return
