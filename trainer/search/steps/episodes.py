"""Read the episodes of runs as summaries, grouped by question.

A store is read once, with one episode in memory at a time. Summaries stay in memory: 280 bytes an
episode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.runs.stats import mean_of as mean
from trainer.search.config import SearchConfig
from trainer.search.data import load_questions
from trainer.search.records import Question, Trajectory
from trainer.search.steps.shared_config import SharedConfig
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

#: The value of an episode, from 0 to 1. both: the mean of judge and NDCG.
Measure = Literal["ndcg", "judge", "both", "reward"]
#: Which of a prompt's episodes count.
Combine = Literal["all", "last_step", "last_run"]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """The summary of an episode.

    order: index of its run.
    name: of the run.
    judge, ndcg, reward: None without a value.
    has_evidence: whether a page with the fact was sent to the generator.
    rank: the best rank of such a page among all hits; None: it was in none.
    turns, searches, crops, invalid: counts of the policy's turns.
    """

    order: int
    name: str
    step: int
    trajectory_id: str
    judge: float | None
    ndcg: float | None
    reward: float | None
    end: str | None
    has_evidence: bool
    rank: int | None
    turns: int
    searches: int
    crops: int
    invalid: int

    def value(self, measure: Measure) -> float | None:
        """Return the value by a measure; None, never 0, if it is missing."""
        if measure == "both":
            values = (self.judge, self.ndcg)
            return None if None in values else sum(part for part in values if part is not None) / 2
        return {"judge": self.judge, "ndcg": self.ndcg, "reward": self.reward}[measure]

    def is_right(self, min_score: float) -> bool:
        """Return whether the judge's score of its answer is at least this."""
        return self.judge is not None and self.judge >= min_score

    @property
    def ref(self) -> str:
        """Return its id in output files: run/trajectory."""
        return f"{self.name}/{self.trajectory_id}"


@dataclass(slots=True)
class CuratedPrompt:
    """A question of the data and its episodes, in the order of runs and steps."""

    question: Question
    samples: list[EpisodeSummary] = field(default_factory=list)

    def counted_episodes(self, combine: Combine, measure: Measure) -> list[EpisodeSummary]:
        """Return the episodes with a value that count by a rule."""
        scored = [sample for sample in self.samples if sample.value(measure) is not None]
        if combine == "all" or not scored:
            return scored
        return of_same_part(scored, scored[-1], combine)

    def mean(self, combine: Combine, measure: Measure) -> float | None:
        """Return the mean of the episodes that count; None without one."""
        return mean_of(self.counted_episodes(combine, measure), measure)


def of_same_part(
    samples: Iterable[EpisodeSummary], last: EpisodeSummary, combine: Combine
) -> list[EpisodeSummary]:
    """Return the episodes of the run of `last`, or of its step if `combine` is last_step."""
    same_run = [sample for sample in samples if sample.order == last.order]
    if combine == "last_run":
        return same_run
    return [sample for sample in same_run if sample.step == last.step]


def mean_of(samples: Iterable[EpisodeSummary], measure: Measure) -> float | None:
    """Return the mean of the values; None without a value."""
    values = [sample.value(measure) for sample in samples]
    return mean([value for value in values if value is not None])


@dataclass(frozen=True, slots=True)
class CuratedRun:
    """A run that was read.

    digest: SHA-256 of its step files.
    """

    folder: Path
    name: str
    episodes: int
    digest: str


#: Is called with each episode (without its ids) and its summary.
Visit = Callable[[Trajectory, EpisodeSummary], None]


def read_prompts(
    runs: Sequence[Path], cfg: SharedConfig, visit: Visit | None = None
) -> tuple[list[CuratedPrompt], list[CuratedRun]]:
    """Return the questions of the data in order with their episodes, and the runs.

    visit: for data that a summary does not have; the episode is in memory during the call. Raises
    UserError if a run has no trajectories or another schema, if an id has another question in the
    data, or if the data does not have a question of a run.
    """
    if not runs and cfg.data.train is None:
        raise UserError("Name a run (--run FOLDER) or questions (--set data.train=FILE).")
    if len({folder.resolve() for folder in runs}) != len(runs):
        raise UserError("--run: a folder is named twice. Its episodes would count twice.")
    prompts = {question.id: CuratedPrompt(question) for question in _questions(runs[-1:], cfg.data)}
    read = [_read_run(order, folder, prompts, visit) for order, folder in enumerate(runs)]
    return list(prompts.values()), read


def run_config(folder: Path, if_missing: str) -> SearchConfig:
    """Return the config of a run.

    if_missing: end of the UserError's sentence if it has none.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{path}: does not exist{if_missing}")
    return load_config(SearchConfig, path)


def _questions(last: Sequence[Path], data: Any) -> list[Question]:
    """Return the questions of `data.train`, else of the last run's config."""
    if data.train is None:
        (run,) = last
        data = run_config(run, ". Name the questions (--set data.train=FILE).").data
        if data.train is None:
            raise UserError(
                f"{run}: its config has no data.train. Set it with --set data.train=FILE."
            )
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
        prompt.samples.append(sample)
        if visit is not None:
            visit(trajectory, sample)
    if unknown:
        raise UserError(
            f"{folder}: {unknown} of {count} episodes are of questions that are not in the "
            "data. Name all questions of the runs (--set data.train=...)."
        )
    return CuratedRun(folder, store.run, count, _digest(store))


def _same(expected: Question, actual: Question, folder: Path) -> None:
    texts = [(question.question, question.reference_answers) for question in (expected, actual)]
    if texts[0] != texts[1]:
        raise UserError(
            f"{folder}: the id {expected.id!r} has another question or reference than in the data. "
            "Use the data of the run."
        )


def sample_of(trajectory: Trajectory, order: int, run: str) -> EpisodeSummary:
    """Return the summary of an episode."""
    turns = [turn for turn in trajectory.turns if not turn.forced]
    carry = carriers(trajectory.question)
    ranks = [hit.rank for turn in turns for hit in turn.hits if hit.page_id in carry]
    actions = [turn.action for turn in turns]
    has_views = any(turn.views for turn in trajectory.turns)  # else only NDCG tells
    return EpisodeSummary(
        order=order,
        name=run,
        step=trajectory.step,
        trajectory_id=trajectory.trajectory_id,
        judge=trajectory.judged.score if trajectory.judged else None,
        ndcg=trajectory.ndcg,
        reward=trajectory.reward.value if trajectory.reward else None,
        end=trajectory.end,
        has_evidence=trajectory.answer_has_evidence if has_views else bool(trajectory.ndcg),
        rank=min(ranks, default=None),
        turns=len(turns),
        searches=actions.count("search"),
        crops=actions.count("crop"),
        invalid=actions.count("invalid"),
    )


def carriers(question: Question) -> set[str]:
    """Return the pages with the fact: the gold pages and their alternatives."""
    return {*question.gold, *(page for pages in question.alternatives.values() for page in pages)}


def covered_facts(question: Question, pages: Collection[str]) -> list[bool]:
    """Return for each gold page whether it or an alternative to it is among the pages."""
    return [not fact.isdisjoint(pages) for fact in question.facts]


def has_all_evidence(trajectory: Trajectory) -> bool:
    """Return whether the answer rests on all gold pages or their alternatives.

    Without a gold page: whether it rests on any page.
    """
    pages = trajectory.sent_pages
    return bool(pages) and all(covered_facts(trajectory.question, pages))


def _digest(store: TrajectoryStore) -> str:
    digest = hashlib.sha256()
    for path in map(store.step_path, store.steps()):
        digest.update(f"{path.name} {digest_of(path)}\n".encode())
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refs(prompt: CuratedPrompt) -> list[str]:
    """Return the ids of a question's episodes."""
    return [sample.ref for sample in prompt.samples]
