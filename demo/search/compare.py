"""The searcher at three stages, side by side: figures, kinds of questions, an episode."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.run import paired_interval
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of
from trainer.search.evaluation.stats import table
from trainer.search.records import Trajectory
from trainer.search.show import end_panel, question_panel, turn_panel

#: What is told of an evaluation, by the keys of its figures.
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


#: A figure of an episode; None: it has none.
Value = Callable[[Trajectory], float | None]


@dataclass(frozen=True, slots=True)
class Stage:
    """An evaluation: its figures, and its episodes, one of each held-out question."""

    title: str
    figures: Mapping[str, Any]
    episodes: Sequence[Trajectory]


def read_stage(title: str, folder: Path, *, first: bool = False) -> Stage:
    """The evaluation in a folder; of a training run the last one, or the first."""
    alone = folder / "evaluation.jsonl"
    if alone.is_file():
        figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        lines = read_jsonl(alone)
    else:
        figures = read_jsonl(folder / "eval.jsonl")[0 if first else -1]
        lines = read_jsonl(folder / figures["completions"])
    return Stage(title, figures, [Trajectory.model_validate(line) for line in lines])


def show_figures(console: Console, stages: Sequence[Stage]) -> None:
    """What was found, what was answered, and what it took."""
    shown = Table("", *(stage.title for stage in stages))
    for figure in table():
        values = [stage.figures.get(figure.key) for stage in stages]
        if figure.key in SHOWN and any(value is not None for value in values):
            cells = [_cell(value, figure.digits) for value in values]
            shown.add_row(figure.title or figure.key, *cells)
    console.print(shown)


def show_types(console: Console, stages: Sequence[Stage]) -> None:
    """NDCG and the judge's score by the type of question."""
    by_type = [_by_type(stage.episodes) for stage in stages]
    shown = Table("NDCG / judge", *(stage.title for stage in stages))
    for name, episodes in by_type[0].items():
        cells = [
            f"{_cell(_mean(_ndcg, of[name]), 2)} / {_cell(_mean(_score, of[name]), 2)}"
            for of in by_type
        ]
        shown.add_row(f"{name} ({len(episodes)})", *cells)
    console.print(shown)


def show_episode(console: Console, stage: Stage) -> None:
    """The first episode that looked closer and was answered right; where there is none, the
    first."""
    right = [one for one in stage.episodes if _score(one) == 1]
    closer = [one for one in right if any(turn.action == "crop" for turn in one.turns)]
    chosen = next(iter([*closer, *right, *stage.episodes]))
    console.print(question_panel(chosen.question))
    for turn in chosen.turns:
        console.print(turn_panel(turn, chosen.question.gold))
    console.print(end_panel(chosen))


def verdict(stages: Sequence[Stage]) -> list[str]:
    """Say what each phase changed, with intervals over the held-out questions, and what is left.

    The last sentence says which phases raised something for certain. What has no figure in one of
    two stages is in no mean, and is counted.
    """
    steps = list(pairwise(stages))
    changes = [
        Change(f"Phase {number}", title, *_pairs(value, *step))
        for number, step in enumerate(steps, 1)
        for title, value in FIGURES.items()
    ]
    parts = [
        f"{phase} raised {' and '.join(raised)}"
        if (raised := [of.title for of in changes if of.phase == phase and of.is_rise])
        else f"{phase} raised nothing that is shown"
        for phase in dict.fromkeys(of.phase for of in changes)
    ]
    last = f"In this run, one seed: {'; '.join(parts)}."
    return [*(of.sentence() for of in changes), _not_learned(stages[-1]), last]


@dataclass(frozen=True, slots=True)
class Change:
    """What a phase did to a figure of a question. changes: of those that have it in both stages;
    missing: how many have not."""

    phase: str
    title: str
    changes: Sequence[float]
    missing: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of a paired bootstrap over the questions, 95 %."""
        return paired_interval(self.changes)

    @property
    def is_rise(self) -> bool:
        """Whether the interval lies above 0."""
        return bool(self.changes) and self.interval[0] > 0

    def sentence(self) -> str:
        """The mean change and its interval."""
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
    """Of the type with the lowest mean: how many are wrong, and how many nobody has judged."""
    means = {name: _mean(_score, of) for name, of in _by_type(stage.episodes).items()}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if not known:
        return "Not learned: not known, for no answer is judged."
    worst = min(known, key=lambda name: known[name])
    scores = [_score(one) for one in _by_type(stage.episodes)[worst]]
    wrong = sum(score is not None and score < 1 for score in scores)
    left = f"of {len(scores)} questions of type {worst!r} {wrong} go wrong still."
    unjudged = scores.count(None)
    return f"Not learned: {left}" + (f" {unjudged} are not judged." if unjudged else "")


def _by_type(episodes: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    found = defaultdict(list)
    for episode in episodes:
        found[episode.question.question_type or "any"].append(episode)
    return dict(sorted(found.items()))


def _mean(value: Value, episodes: Sequence[Trajectory]) -> float | None:
    """Of those that have one; None where none has."""
    return mean_of([found for one in episodes if (found := value(one)) is not None])


def _cell(value: float | None, digits: int) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}f}"


def _ndcg(episode: Trajectory) -> float | None:
    return episode.ndcg


def _score(episode: Trajectory) -> float | None:
    """The judge's; None where nothing could be judged."""
    return None if episode.judged is None else episode.judged.score


#: What the verdict is about.
FIGURES: dict[str, Value] = {"NDCG": _ndcg, "judge's score": _score}
