"""Compares the searcher at three stages: stats, question types, and an example episode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.common import read_evaluation
from scorekit.paired import mean_interval
from trainer.runs.stats import mean_of
from trainer.search.evaluation.stats import VALUES, table
from trainer.search.records import Trajectory
from trainer.search.trajectories.show import end_panel, question_panel, turn_panel

#: Keys of the stats that are shown.
SHOWN = (
    "reward_mean",
    "ndcg_mean",
    "judge_mean",
    "success_share",
    "gold_seen_share",
    "turns_mean",
    "searches_mean",
    "crops_mean",
    "invalid_share",
    "forced_share",
    "generator_calls",
    "money",
)


#: Returns a stat of an episode, or None if the episode has none.
Value = Callable[[Trajectory], float | None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds an evaluation: its stats, and one episode for each held-out question."""

    title: str
    stats: Mapping[str, Any]
    episodes: Sequence[Trajectory]


def read_stage(title: str, folder: Path, *, first: bool = False) -> Stage:
    """Read the evaluation in a folder. For a training run, read the last one, or the first."""
    stats, lines = read_evaluation(folder, first=first)
    return Stage(title, stats, [Trajectory.model_validate(line) for line in lines])


def show_stats(console: Console, stages: Sequence[Stage]) -> None:
    """Print a table of retrieval, answer and cost stats."""
    stats_table = Table("", *(stage.title for stage in stages))
    for stat in table():
        values = [stage.stats.get(stat.key) for stage in stages]
        if stat.key in SHOWN and any(value is not None for value in values):
            cells = [_cell(value, stat.digits) for value in values]
            stats_table.add_row(stat.title or stat.key, *cells)
    console.print(stats_table)


def show_types(console: Console, stages: Sequence[Stage]) -> None:
    """Print a table of NDCG and the judge's score by question type."""
    by_type = [_by_type(stage.episodes) for stage in stages]
    types_table = Table("NDCG / judge", *(stage.title for stage in stages))
    for name, episodes in by_type[0].items():
        cells = [
            f"{_cell(_mean(_ndcg, grouped[name]), 2)} / {_cell(_mean(_score, grouped[name]), 2)}"
            for grouped in by_type
        ]
        types_table.add_row(f"{name} ({len(episodes)})", *cells)
    console.print(types_table)


def show_episode(console: Console, stage: Stage) -> None:
    """Print the first correct episode that cropped an image, else the first correct one, else
    the first.
    """
    right = [episode for episode in stage.episodes if _score(episode) == 1]
    closer = [episode for episode in right if any(turn.action == "crop" for turn in episode.turns)]
    chosen = next(iter([*closer, *right, *stage.episodes]))
    console.print(question_panel(chosen.question))
    for turn in chosen.turns:
        console.print(turn_panel(turn, chosen.question.gold))
    console.print(end_panel(chosen))


def verdict(stages: Sequence[Stage]) -> list[str]:
    """Return sentences on what each phase changed, with intervals over the held-out questions.

    The last sentence says which stats each phase raised or lowered with certainty. A question
    without a value in one of two stages is left out of the means, and counted.
    """
    steps = list(pairwise(stages))
    changes = [
        Change(f"Phase {number}", title, *_pairs(value, *step))
        for number, step in enumerate(steps, 1)
        for title, value in FIGURES.items()
    ]
    parts = [
        _summary(phase, [change for change in changes if change.phase == phase])
        for phase in dict.fromkeys(change.phase for change in changes)
    ]
    last = (
        f"In this run, one seed: {'; '.join(parts)}. Another seed can differ: "
        "docs/explanation/evidence/phases.md has several."
    )
    return [
        *(change.sentence() for change in changes),
        _ends(stages[-1]),
        _not_learned(stages[-1]),
        last,
    ]


def _summary(phase: str, changes: Sequence[Change]) -> str:
    """Return what a phase raised and lowered, as part of a sentence."""
    raised = [change.title for change in changes if change.is_rise]
    lowered = [change.title for change in changes if change.is_fall]
    parts = [f"raised {' and '.join(raised)}"] if raised else ["raised nothing that is shown"]
    parts += [f"lowered {' and '.join(lowered)}"] if lowered else []
    return f"{phase} {', and '.join(parts)}"


def _ends(stage: Stage) -> str:
    """Say how many episodes the policy ended itself, and in how many it cropped."""
    own_ends = sum(map(_own_end, stage.episodes))
    num_cropped = sum(_crops(episode) > 0 for episode in stage.episodes)
    return (
        f"At the end the policy ends {own_ends:.0f} of {len(stage.episodes)} episodes itself, and "
        f"crops in {num_cropped}."
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Describes how a phase changed a stat per question.

    changes: one value for each question that has the stat in both stages.
    missing: how many have not.
    """

    phase: str
    title: str
    changes: Sequence[float]
    missing: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of a paired bootstrap over the questions."""
        return mean_interval(self.changes)

    @property
    def is_rise(self) -> bool:
        """Return whether the interval lies above 0."""
        return bool(self.changes) and self.interval[0] > 0

    @property
    def is_fall(self) -> bool:
        """Return whether the interval lies below 0."""
        return bool(self.changes) and self.interval[1] < 0

    def sentence(self) -> str:
        """Return a sentence with the mean change and its interval."""
        total = len(self.changes) + self.missing
        without = f"; {self.missing} of {total} questions have none" if self.missing else ""
        if not self.changes:
            return f"{self.phase}: {self.title} \N{EN DASH} a question{without}."
        low, high = self.interval
        return (
            f"{self.phase}: {self.title} {fmean(self.changes):+.3f} a question "
            f"(95 % interval of a paired bootstrap: {low:+.3f} to {high:+.3f}{without})."
        )


def _pairs(value: Value, first: Stage, last: Stage) -> tuple[list[float], int]:
    pairs = [(value(a), value(b)) for a, b in zip(first.episodes, last.episodes, strict=True)]
    changes = [b - a for a, b in pairs if a is not None and b is not None]
    return changes, len(pairs) - len(changes)


def _not_learned(stage: Stage) -> str:
    """Describe the question type with the lowest mean: how many are wrong or not judged."""
    means = {name: _mean(_score, group) for name, group in _by_type(stage.episodes).items()}
    known_means = {name: mean for name, mean in means.items() if mean is not None}
    if not known_means:
        return "Not learned: not known, for no answer is judged."
    worst = min(known_means, key=lambda name: known_means[name])
    scores = [_score(episode) for episode in _by_type(stage.episodes)[worst]]
    wrong = sum(score is not None and score < 1 for score in scores)
    left = f"of {len(scores)} questions of type {worst!r} {wrong} go wrong still."
    unjudged = scores.count(None)
    return f"Not learned: {left}" + (f" {unjudged} are not judged." if unjudged else "")


def _by_type(episodes: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    episodes_by_type = defaultdict(list)
    for episode in episodes:
        episodes_by_type[episode.question.question_type or "any"].append(episode)
    return dict(sorted(episodes_by_type.items()))


def _mean(value: Value, episodes: Sequence[Trajectory]) -> float | None:
    """Return the mean of the values that exist, or None if there are none."""
    return mean_of([number for episode in episodes if (number := value(episode)) is not None])


def _cell(value: float | None, digits: int) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}f}"


def _ndcg(episode: Trajectory) -> float | None:
    return episode.ndcg


def _score(episode: Trajectory) -> float | None:
    """Return the judge's score, or None if nothing could be judged."""
    return None if episode.judged is None else episode.judged.score


def _crops(episode: Trajectory) -> float:
    return VALUES["crops_mean"](episode) or 0.0


def _own_end(episode: Trajectory) -> float:
    """Return 1 if the policy ended the episode with search_complete, else 0."""
    return float(episode.end == "complete")


#: Stats that the verdict compares, by title.
FIGURES: dict[str, Value] = {
    "NDCG": _ndcg,
    "judge's score": _score,
    "crops": _crops,
    "own ends": _own_end,
}
