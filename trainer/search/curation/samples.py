"""What curation reads of the episodes: a line of figures each, gathered by prompt.

A store of any size is read once, an episode at a time. The lines lie on the disk; in memory are the
questions, and the lines of the prompt that is looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.search.config import SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.measures import Combine, Measure
from trainer.search.curation.spool import Spool
from trainer.search.data import load_questions
from trainer.search.records import SUCCESS, Question, Trajectory
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode in figures.

    order: of the run among those given. name: of the run.
    judge, ndcg, reward: None where there is none. seen: whether a page that carries the fact was
    shown. rank: the best at which such a page stood among the hits of any search, shown or not;
    None: in none. turns, searches, crops, invalid: the policy's own. answered: whether the
    generator gave an answer.
    """

    order: int
    name: str
    step: int
    trajectory_id: str
    judge: float | None
    ndcg: float | None
    reward: float | None
    end: str | None
    seen: bool
    rank: int | None
    turns: int
    searches: int
    crops: int
    invalid: int
    answered: bool

    def value(self, measure: Measure) -> float | None:
        """What it is worth; None where that was not had. Never 0 in place of it."""
        if measure == "both":
            both = (self.judge, self.ndcg)
            return None if None in both else sum(of for of in both if of is not None) / 2
        return {"judge": self.judge, "ndcg": self.ndcg, "reward": self.reward}[measure]

    @property
    def success(self) -> bool:
        """Whether its answer was judged right."""
        return self.judge is not None and self.judge >= SUCCESS

    @property
    def ref(self) -> str:
        """Its name in what is written: run/trajectory."""
        return f"{self.name}/{self.trajectory_id}"


@dataclass(slots=True)
class CuratedPrompt:
    """A question of the data with all its episodes. spool: those of all questions."""

    question: Question
    spool: Spool[Sample]

    @property
    def samples(self) -> list[Sample]:
        """Its episodes in the order of runs and steps; read from the disk each time."""
        return self.spool.under(self.question.id)

    def counted(self, combine: Combine, measure: Measure) -> list[Sample]:
        """The episodes that count by a rule, of those that have a value."""
        scored = [sample for sample in self.samples if sample.value(measure) is not None]
        if combine == "all" or not scored:
            return scored
        last = scored[-1]
        if combine == "last_run":
            return [sample for sample in scored if sample.order == last.order]
        where = (last.order, last.step)
        return [sample for sample in scored if (sample.order, sample.step) == where]

    def mean(self, combine: Combine, measure: Measure) -> float | None:
        """Mean of the episodes that count; None where there is none."""
        return mean_of(self.counted(combine, measure), measure)


def mean_of(samples: Iterable[Sample], measure: Measure) -> float | None:
    """Of those that have a value; None where none has."""
    values = [sample.value(measure) for sample in samples]
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


@dataclass(frozen=True, slots=True)
class CuratedRun:
    """A run that was read. digest: SHA-256 over its steps' files."""

    folder: Path
    name: str
    episodes: int
    digest: str


#: Is told of each episode as it is read (without its ids), beside its sample.
Visit = Callable[[Trajectory, Sample], None]


def read_prompts(
    runs: Sequence[Path], cfg: CurationConfig, visit: Visit | None = None
) -> tuple[list[CuratedPrompt], list[CuratedRun]]:
    """The questions of the data in their order, each with its episodes, and what was read.

    visit: for what a sample does not say; an episode is in memory while it is told of.

    Raises UserError where a run has no trajectories, has those of another schema, or was given
    another question under an id; and where it is of questions that the data does not have.
    """
    if not runs and cfg.data.train is None:
        raise UserError("name a run to read (--run FOLDER), or questions (--set data.train=FILE)")
    if len({folder.resolve() for folder in runs}) != len(runs):
        raise UserError("--run: a folder is named twice: its episodes would count twice")
    spool = Spool(Sample)
    prompts = {one.id: CuratedPrompt(one, spool) for one in _questions(runs[-1:], cfg.data)}
    read = [_read_run(order, folder, prompts, visit) for order, folder in enumerate(runs)]
    return list(prompts.values()), read


def _questions(last: Sequence[Path], data: Any) -> list[Question]:
    """Of the data that is named, or of the last run."""
    if data.train is None:
        (run,) = last
        path = run / "config.yaml"
        if not path.is_file():
            raise UserError(f"{path}: not there: name the questions (--set data.train=FILE)")
        data = load_config(SearchConfig, path).data
        if data.train is None:
            raise UserError(f"{run}: its config names no data.train: --set data.train=FILE")
    return load_questions(data.train, data, split=data.train_split, limit=data.train_limit)


def _read_run(
    order: int, folder: Path, prompts: dict[str, CuratedPrompt], visit: Visit | None
) -> CuratedRun:
    store = TrajectoryStore(folder / FOLDER)
    count, unknown = 0, 0
    for trajectory in store.read(tokens=False):
        count += 1
        prompt = prompts.get(trajectory.question.id)
        if prompt is None:
            unknown += 1
            continue
        _same(prompt.question, trajectory.question, folder)
        sample = sample_of(trajectory, order, store.run)
        prompt.spool.append(sample, prompt.question.id)
        if visit is not None:
            visit(trajectory, sample)
    if unknown:
        raise UserError(
            f"{folder}: {unknown} of {count} episodes are of questions that the data lacks: "
            "name all that the runs were given (--set data.train=...)"
        )
    return CuratedRun(folder, store.run, count, _digest(folder / FOLDER, store.steps()))


def _same(ours: Question, theirs: Question, folder: Path) -> None:
    if (ours.question, ours.reference_answer) != (theirs.question, theirs.reference_answer):
        raise UserError(
            f"{folder}: under the id {ours.id!r} it was asked another question, or has another "
            "reference, than in the data: these are runs of different data"
        )


def sample_of(trajectory: Trajectory, order: int, run: str) -> Sample:
    """An episode in figures."""
    own = [turn for turn in trajectory.turns if not turn.forced]
    carry = carriers(trajectory.question)
    ranks = [hit.rank for turn in own for hit in turn.hits if hit.page_id in carry]
    actions = [turn.action for turn in own]
    return Sample(
        order=order,
        name=run,
        step=trajectory.step,
        trajectory_id=trajectory.trajectory_id,
        judge=trajectory.judged.score if trajectory.judged else None,
        ndcg=trajectory.ndcg,
        reward=trajectory.reward.value if trajectory.reward else None,
        end=trajectory.end,
        seen=trajectory.saw_evidence,
        rank=min(ranks, default=None),
        turns=len(own),
        searches=actions.count("search"),
        crops=actions.count("crop"),
        invalid=actions.count("invalid"),
        answered=trajectory.answer is not None and trajectory.answer.status == "ok",
    )


def carriers(question: Question) -> set[str]:
    """Pages that carry the fact: the gold ones, and their alternatives."""
    return {*question.gold, *(page for of in question.alternatives.values() for page in of)}


def evidence_pages(trajectory: Trajectory) -> set[str]:
    """Return the pages that the answer rests on: those whose pictures the generator was sent; those
    that were shown, where the episode does not say which were sent."""
    sent = set(trajectory.answer.evidence) if trajectory.answer else set()
    if not sent:
        return set(trajectory.shown_pages)
    views = (view for turn in trajectory.turns for view in turn.views)
    return {view.page_id for view in views if view.image in sent}


def covered_facts(question: Question, pages: Collection[str]) -> list[bool]:
    """Return for each gold page whether it, or an alternative to it, is among these pages."""
    facts = ({gold, *question.alternatives.get(gold, ())} for gold in question.gold)
    return [not fact.isdisjoint(pages) for fact in facts]


def has_evidence(trajectory: Trajectory) -> bool:
    """Return whether the answer rests on every gold page or alternatives to them; on any page,
    where the question names no gold page."""
    pages = evidence_pages(trajectory)
    return bool(pages) and all(covered_facts(trajectory.question, pages))


def _digest(folder: Path, steps: Sequence[int]) -> str:
    whole = hashlib.sha256()
    for step in steps:
        name = f"step-{step:06d}.jsonl.gz"
        with (folder / name).open("rb") as file:
            whole.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
