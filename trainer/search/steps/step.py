"""The interface of a curation step: name, options, config, paid calls, decisions and page.

`engine.run_step` runs a step; `table.py` lists all steps. CONTRIBUTING.md shows a new one.
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from scorekit.config import Config
from scorekit.net.addresses import without_userinfo
from scorekit.paid.account import ApiUsage
from trainer.search.answer.config import AnsweringConfig
from trainer.search.config import RetrieverConfig
from trainer.search.records import Trajectory
from trainer.search.steps.asking import Asking, Models
from trainer.search.steps.episodes import CuratedPrompt, CuratedRun, EpisodeSummary
from trainer.search.steps.options import CurationOptions
from trainer.search.steps.prior import SCHEMA_VERSION, PriorDecisions
from trainer.search.steps.shared_config import SharedConfig
from trainer.sft.curation_record import CurationRecord, RecordEntry

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a row.

    reason: one of the step's fixed texts, by which rows are counted.
    stats: the values behind it.
    episodes: run/trajectory of its episodes.
    row: the row that is kept, in the form of training data; None: it is dropped, or its step writes
    the rows itself."""

    row_id: str
    is_kept: bool
    reason: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    episodes: Sequence[str] = ()
    row: Mapping[str, Any] | None = None

    def line(self) -> dict[str, Any]:
        """Return the row of decisions.jsonl."""
        head = {"id": self.row_id, "kept": self.is_kept, "reason": self.reason}
        return {**head, **self.stats, "episodes": list(self.episodes)}


@dataclass(slots=True)
class Outcome:
    """The result of a step before it is written.

    step: its name.
    settings: its config section.
    runs: the runs that were read.
    inputs: other files, name -> digest.
    extra: further keys of the manifest.
    record: earlier decisions, if the step adds to them.
    decisions: of all rows.
    """

    step: str
    settings: Config
    runs: Sequence[CuratedRun] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    record: CurationRecord | None = None
    decisions: list[Decision] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the kept rows in order."""
        return (item.row for item in self.decisions if item.row is not None)

    @property
    def kept_ids(self) -> Iterator[str]:
        """Yield the ids of the kept rows in order."""
        return (item.row_id for item in self.decisions if item.is_kept)

    def manifest(self) -> dict[str, Any]:
        """Return the content of manifest.json."""
        reasons = Counter((decision.is_kept, decision.reason) for decision in self.decisions)
        num_kept = sum(count for (is_kept, _), count in reasons.items() if is_kept)
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.step,
            "settings": without_userinfo(self.settings.model_dump(mode="json")),
            "runs": [
                {
                    "folder": str(run.folder),
                    "run": run.name,
                    "episodes": run.episodes,
                    "sha256": run.digest,
                }
                for run in self.runs
            ],
            "inputs": dict(self.inputs),
            "counts": {
                "rows": reasons.total(),
                "kept": num_kept,
                "dropped": reasons.total() - num_kept,
                "reasons": {
                    ("kept: " if is_kept else "dropped: ") + reason: count
                    for (is_kept, reason), count in sorted(reasons.items())
                },
            },
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page.

    head: titles of the table.
    images: charts (SVG); None: no data.
    """

    title: str
    words: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    images: Sequence[str | None] = ()


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A piece of a step's paid work.

    key: of its answer.
    calls: server -> usage of each call that it makes at most."""

    key: str
    subject: Any
    calls: Mapping[str, Sequence[ApiUsage]] = field(default_factory=dict)


@dataclass(slots=True)
class Work(Generic[C]):
    """The inputs of a step.

    settings: its config section.
    prompts: the questions with their episodes.
    notes: of `Step.note`, by `EpisodeSummary.ref`, in the order of the episodes.
    prior: earlier decisions.
    answering, retriever: the servers of the last run, with the keys that the config sets.
    resources: what `Step.resources` has opened.
    """

    options: CurationOptions
    cfg: SharedConfig
    settings: C
    prompts: Sequence[CuratedPrompt]
    runs: Sequence[CuratedRun]
    notes: Mapping[str, Any]
    prior: PriorDecisions
    answering: AnsweringConfig
    retriever: RetrieverConfig
    resources: Any = None

    @property
    def by_id(self) -> dict[str, CuratedPrompt]:
        """Return the prompts by the id of their question."""
        return {prompt.question.id: prompt for prompt in self.prompts}


class Step(ABC, Generic[C]):
    """A curation step: a command, a section of the config and a step of `search loop`.

    Its docstring is the command's help, which needs no extra: a step's module imports packages of
    extras where it uses them.

    title: of its page.
    config: class of its section.
    options: its command's, in the order of --help: fields of `CurationOptions`, and `further`.
    further: options of it alone: name -> (annotation, default; ... without one).
    also: further sections that its result depends on.
    paths: keys of the config that may name a path in the folder of a loop.
    needs: the step of the same round whose rows it takes.
    asks: the servers that it pays, in the order of an estimate.
    moves: what of the loop's state (`rounds.plan.LoopState`) it replaces.
    records: whether its decisions are part of the record.
    drops: whether the rounds' table counts its rows.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    config: type[C]
    options: ClassVar[tuple[str, ...]]
    further: ClassVar[Mapping[str, tuple[Any, Any]]] = MappingProxyType({})
    also: ClassVar[tuple[str, ...]] = ()
    paths: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[str | None] = None
    asks: ClassVar[tuple[str, ...]] = ()
    moves: ClassVar[tuple[Literal["data", "buckets", "focused", "rows", "record"], ...]] = ()
    records: ClassVar[bool] = False
    drops: ClassVar[bool] = False

    def note(self, trajectory: Trajectory, sample: EpisodeSummary, settings: C) -> Any:
        """Return data about an episode that its summary does not have; None: nothing.

        The episode is in memory during the call, without its ids.
        """
        return None

    def plan(self, work: Work[C]) -> list[WorkItem]:
        """Return the paid work, without asking anybody."""
        return []

    def models(self, work: Work[C]) -> Models:
        """Return the models that are asked."""
        return Models(work.answering, cap=work.answering.money.cap)

    def estimate_head(self, items: Sequence[WorkItem]) -> list[str]:
        """Return lines that `--estimate` prints first."""
        return []

    def resources(self, work: Work[C]) -> AbstractContextManager[Any]:
        """Open what asking and writing need: pages, proposals. It is not called for an estimate."""
        return nullcontext()

    async def ask(self, item: WorkItem, asking: Asking, work: Work[C]) -> Any:
        """Return the answer of an item. Equal requests are paid for once."""
        raise NotImplementedError

    def decide_one(self, prompt: CuratedPrompt, work: Work[C], answer: Any) -> Decision:
        """Return the decision about a prompt.

        answer: of the item with its id; None without one.
        """
        raise NotImplementedError

    def decide(self, work: Work[C], answers: Mapping[str, Any]) -> Outcome:
        """Return the decisions about all rows.

        answers: by the key of their item.
        """
        outcome = self.outcome(work)
        for prompt in work.prompts:
            answer = answers.get(prompt.question.id)
            outcome.decisions.append(self.decide_one(prompt, work, answer))
        return outcome

    def outcome(self, work: Work[C]) -> Outcome:
        """Return an outcome without decisions."""
        record = work.prior.record if self.records else None
        return Outcome(self.name, work.settings, work.runs, work.prior.inputs, record=record)

    def entries(self, row: Mapping[str, Any]) -> Iterator[RecordEntry]:
        """Yield the entries of the record for a row of its decisions.jsonl."""
        return iter(())

    def sections(self, work: Work[C], outcome: Outcome) -> list[Section]:
        """Return the sections of its page, before the examples of each reason."""
        return []

    def write_rows(self, work: Work[C], outcome: Outcome, folder: Path) -> bool:
        """Write the kept rows into the folder. False: they are those of the decisions."""
        return False

    def files(self, work: Work[C], outcome: Outcome) -> Mapping[str, bytes]:
        """Return further files of its folder, name -> content."""
        return {}

    def lines(self, work: Work[C], outcome: Outcome) -> list[str]:
        """Return lines to print after the counts."""
        return []

    def in_loop(self, cfg: SharedConfig, policy: str) -> None:
        """Complete the config of a loop.

        policy: that of the last training or SFT.
        """

    def takes_rows(self, cfg: SharedConfig) -> bool:
        """Return whether the loop gives it the rows of the last `focus`."""
        return "rows" in self.options

    def loop_error(self, cfg: SharedConfig, answering: AnsweringConfig) -> str | None:
        """Return why a loop must not start with this config, or None.

        answering: of the round's training. May raise UserError, too.
        """
        return None
