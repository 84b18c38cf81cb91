"""Evaluate a policy: one episode of each held-out question, rewarded as in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scorekit.numeric.thresholds import below
from trainer.rl.distributed import DistributedContext
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import JsonlFile, read_jsonl
from trainer.search.episode_runner import EpisodeRunner
from trainer.search.evaluation.stats import by_document, by_type, compute_stats
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.policies import Policy

#: Min share of the episodes with a possible reward that a mean must cover for the best checkpoint.
_MIN_COVERAGE = 0.95
#: Stats that are fields of a report.
_FIELD_STATS = ("samples", "reward_mean", "reward_coverage")
#: Key of grouped stats -> the name of a group in its row.
_GROUPS = {"by_document": "document", "by_type": "type"}


@dataclass(slots=True)
class SearchReport:
    """The stats of an evaluation, with one episode of each question. None: no value to average.

    reward_mean: over the episodes with a reward (reward_coverage). values: the other stats
    (evaluation/stats.py) by key; `report[key]` returns them too. by_document, by_type: some stats
    of each document and of each type of question; {} for a single one. examples: the episodes
    (`records.Trajectory`) as JSON, without their ids.
    """

    samples: int
    reward_mean: float | None
    reward_coverage: float
    values: dict[str, Any]
    by_document: dict[str, dict[str, Any]]
    by_type: dict[str, dict[str, Any]]
    seconds: float
    examples: Sequence[dict[str, Any]]

    def __getitem__(self, key: str) -> Any:
        return self.stats()[key]

    @property
    def rating(self) -> float | None:
        """Return reward_mean, by which the best checkpoint is chosen.

        None if too many episodes have no reward: the missing ones may be the hard ones.
        """
        num_possible = self.samples - self.values["goldless"]
        num_covered = round(self.reward_coverage * self.samples)
        return None if below(num_covered, _MIN_COVERAGE * num_possible) else self.reward_mean

    def stats(self) -> dict[str, Any]:
        """Return all stats by key, without the examples.

        Groups are lists of rows, because a tracker would log each number of a mapping, and there
        may be a thousand documents.
        """
        stats = {f.name: getattr(self, f.name) for f in fields(self)}
        del stats["examples"]
        for key, name in _GROUPS.items():
            stats[key] = [{name: group} | row for group, row in stats[key].items()]
        return stats.pop("values") | stats

    @property
    def episodes(self) -> list[Trajectory]:
        """Return the examples as trajectories."""
        return [Trajectory.model_validate(line) for line in self.examples]


def evaluate_questions(
    episodes: EpisodeRunner,
    policy: Policy,
    questions: Sequence[Question],
    world: DistributedContext,
    *,
    step: int,
    name: str,
) -> SearchReport:
    """Run one episode of each question and get its answer, verdict and reward.

    name: of the set; step: of the run; both are in the ids of the episodes. The processes of the
    world share the questions, and each gets the full report. Raises what `Episodes` raises:
    BudgetExceeded, ServiceUnreachable.
    """
    started = time.monotonic()
    finished = episodes.run(policy, world.split_items(questions), step=step, kind=f"{name}-")
    rewarded = list(episodes.collect_rewards(step, finished).values())
    values: dict[str, Any] = compute_stats(rewarded)
    field_values = {key: values.pop(key) for key in _FIELD_STATS}
    return SearchReport(
        **field_values,
        values=values,
        by_document=by_document(rewarded),
        by_type=by_type(rewarded),
        seconds=time.monotonic() - started,
        examples=[episode.model_dump(mode="json", exclude={"tokens"}) for episode in rewarded],
    )


def read_reports(folder: Path) -> dict[str, list[tuple[int, SearchReport]]]:
    """Return (update, report) of the evaluations in a run's eval.jsonl, by set name."""
    sets: dict[str, list[tuple[int, SearchReport]]] = {}
    for line in read_jsonl(folder / "eval.jsonl"):
        name, update, dump = (
            line.pop("set", DEFAULT_EVAL_SET),
            line.pop("update"),
            line.pop("completions"),
        )
        line.pop("decides", None)
        values = {f.name: line.pop(f.name, None) for f in fields(SearchReport)}
        for key, group_key in _GROUPS.items():
            values[key] = {row.pop(group_key): row for row in values[key]}
        values |= {"values": line, "examples": JsonlFile(folder / dump)}
        sets.setdefault(name, []).append((update, SearchReport(**values)))
    return sets
