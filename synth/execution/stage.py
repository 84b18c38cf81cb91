"""The interface of a stage, and the work that its run is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scorekit.errors import ScorekitError, UserError
from synth.config import SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.clients import Clients
from synth.record import KeptRecord, RejectedRecord
from synth.storage.distributions import DistributionChart, Distributions
from synth.storage.shares import ShardShare
from synth.storage.stats import StageStats
from synth.storage.store import Record, StageFolder


class StageIncomplete(ScorekitError):
    """Raised if records are left open because services failed. Exit code 3; `--resume` retries."""

    exit_code = 3
    word = "unfinished"

    def __init__(self, stage: str, open_: Counter[str]) -> None:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(open_.items()))
        super().__init__(
            f"{stage}: {open_.total()} records are left open ({codes}). --resume asks again, "
            "--resume --give-up rejects what is still not answered"
        )
        self.stage = stage
        self.open = open_


@dataclass(slots=True)
class StageProgress:
    """Shows the progress of a stage while it runs.

    advance: called with the number of records done, and first with the total, for a progress bar.
    print_line: called with a line for the user.
    stats: what this process has done.
    """

    advance: Callable[[int, int | None], None] = lambda done, total: None
    print_line: Callable[[str], None] = lambda line: None
    stats: StageStats = field(default_factory=StageStats)


@dataclass(slots=True)
class StageWork:
    """The work of this process on a stage.

    folder: where its output goes.
    out_dirs: folders that may have the output of earlier stages: of this run; for a dry run, then
        that of the run itself.
    limit: largest number of input records, over all shards.
    share: the shards that this process takes.
    give_up: reject records without an answer instead of leaving them open.
    """

    cfg: SynthConfig
    folder: StageFolder
    out_dirs: tuple[Path, ...]
    limit: int | None = None
    share: ShardShare = field(default_factory=ShardShare)
    give_up: bool = False
    progress: StageProgress = field(default_factory=StageProgress)


class Stage(ABC):
    """Base class of a stage. Attributes with a default are optional.

    name: in commands, in `stages/NAME/` and in every table.
    other_names: aliases in commands.
    view: file in the run's folder with the accepted records; None: no view.
    outputs: other files in the run's folder.
    has_shards: its records are in shards, which `show` prints.
    shows_rejected: it rejects translations by their text, and the report shows examples.
    charts: charts of the report with its distributions.
    after: the previous stage; None for the first.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[str | None] = None
    outputs: ClassVar[tuple[str, ...]] = ()
    has_shards: ClassVar[bool] = True
    shows_rejected: ClassVar[bool] = False
    charts: ClassVar[tuple[DistributionChart, ...]] = ()

    def __init__(self, after: Stage | None = None) -> None:
        self.after = after

    @property
    def output_files(self) -> tuple[str, ...]:
        """Return all files in the run's folder that it writes, except `stages/NAME/`."""
        return self.outputs if self.view is None else (self.view, *self.outputs)

    @property
    def previous_stages(self) -> tuple[Stage, ...]:
        """Return all previous stages in order."""
        return () if self.after is None else (*self.after.previous_stages, self.after)

    def input_of(self, out_dirs: Sequence[Path]) -> StageFolder:
        """Return the previous stage's output, of the first folder that has some. Raises UserError
        if there is none."""
        assert self.after is not None
        sources = [StageFolder(out_dir, self.after.name) for out_dir in out_dirs]
        source = next((s for s in sources[:-1] if s.manifest() is not None), sources[-1])
        if source.shards() is None:
            raise UserError(f"{source.path}: no output there. Run --stage {source.name} first")
        return source

    @abstractmethod
    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the part of the config that its output depends on."""

    def cost(self, run: Sizes) -> Cost:
        """Return its cost if every source passes all stages."""
        return Cost(self.name)

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return distributions of its records by name, for stats.json and the report. It reads the
        records once, in little memory."""
        return {}

    def errors(self, folder: StageFolder) -> Iterator[str]:
        """Yield a line for each damaged shard, with the command that repairs it."""
        for index in range(folder.shards() or 0):
            try:
                if folder.mark(index) is not None:
                    folder.verify(index)
            except UserError as error:
                yield str(error)

    def finish(self, folder: StageFolder, cfg: SynthConfig, limit: int | None) -> None:
        """Complete the stage after all of its shards are done.

        folder: its output.
        limit: largest number of input records; None: it took all.
        """
        return


class MapStage(Stage):
    """A stage of one record at a time.

    services: those that it calls: of "teacher", "metricx", "judge"."""

    services: ClassVar[frozenset[str]] = frozenset()

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """Return the services that it calls under this config."""
        return self.services

    @abstractmethod
    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Process a record, as a function of it and of the services' answers."""


class GlobalStage(Stage):
    """A stage that needs all records at once. It writes its shards, marks and manifest.

    runs_alone: one process runs it after the previous stage; else the stage itself shares the work
    among several processes.
    """

    runs_alone: ClassVar[bool] = True

    @abstractmethod
    def run(self, work: StageWork, manifest: dict[str, Any]) -> None:
        """Run the full stage.

        manifest: its settings, which it writes with its shards.
        """

    def verify(self, folder: StageFolder) -> None:
        """Raise UserError if files of the finished stage have changed."""
        folder.verify_marks()
        for index in range(folder.shards() or 0):
            folder.verify(index)
