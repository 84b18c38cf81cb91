"""The searcher at three stages, side by side: figures, kinds of questions, an episode."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.run import paired_interval
from trainer.runs.figures import mean_of
from trainer.runs.runlog import read_jsonl
from trainer.search.evaluation.figures import table
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
        if figure.key in SHOWN and None not in values:
            cells = [f"{value:.{figure.digits}f}" for value in values]
            shown.add_row(figure.title or figure.key, *cells)
    console.print(shown)


def show_types(console: Console, stages: Sequence[Stage]) -> None:
    """NDCG and the judge's score by the type of question."""
    by_type = [_by_type(stage.episodes) for stage in stages]
    shown = Table("NDCG / judge", *(stage.title for stage in stages))
    for name, episodes in by_type[0].items():
        cells = [f"{_ndcg(of[name]):.2f} / {_judged(of[name]):.2f}" for of in by_type]
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
    """What the two phases changed, with intervals over the held-out questions, and what is left."""
    said = []
    for title, value in (("NDCG", lambda one: one.ndcg or 0.0), ("judge's score", _score)):
        first, last = ([value(one) for one in stage.episodes] for stage in (stages[0], stages[-1]))
        changes = [b - a for a, b in zip(first, last, strict=True)]
        low, high = paired_interval(changes)
        said.append(
            f"Both phases: {title} {mean_of(changes) or 0.0:+.3f} a question "
            f"(95 % interval of a paired bootstrap: {low:+.3f} to {high:+.3f})."
        )
    worst, left = min(
        _by_type(stages[-1].episodes).items(), key=lambda of_type: _judged(of_type[1])
    )
    wrong = sum(_score(one) < 1 for one in left)
    said.append(f"Not learned: of {len(left)} questions of type {worst!r} {wrong} go wrong still.")
    return said


def _by_type(episodes: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    found = defaultdict(list)
    for episode in episodes:
        found[episode.question.question_type or "any"].append(episode)
    return dict(sorted(found.items()))


def _ndcg(episodes: Sequence[Trajectory]) -> float:
    return mean_of([one.ndcg for one in episodes if one.ndcg is not None]) or 0.0


def _judged(episodes: Sequence[Trajectory]) -> float:
    return mean_of([_score(one) for one in episodes]) or 0.0


def _score(episode: Trajectory) -> float:
    """The judge's; 0 where nothing could be judged."""
    judged = episode.judged
    return 0.0 if judged is None or judged.score is None else judged.score
