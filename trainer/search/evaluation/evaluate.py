"""Evaluate a policy: one episode of each held-out question, rewarded as in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.runs.evaluation.files import EvaluationReport, reports_by_set
from trainer.runs.run_log import read_jsonl
from trainer.search.evaluation.stats import compute_stats, episodes_of, stats_by
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import Policy
from trainer.search.rollout.episode_runner import EpisodeRunner

#: Stats that come last in a report.
_LAST_STATS = ("samples", "reward_mean", "reward_coverage")


class SearchReport(EvaluationReport):
    """The stats of an evaluation (evaluation/stats.py); its examples are episodes as JSON.

    by_document, by_type: some stats of each document and of each type of question; [] for a single
    one. They are lists of rows, because a tracker would log each number of a mapping, and there may
    be a thousand documents.
    """

    unrewardable = "goldless"

    @property
    def episodes(self) -> list[Trajectory]:
        """Return the examples as trajectories."""
        return episodes_of(self.examples)


def evaluate_questions(
    episodes: EpisodeRunner,
    policy: Policy,
    questions: Sequence[Question],
    *,
    step: int,
    name: str,
) -> SearchReport:
    """Run one episode of each question and get its answer, verdict and reward.

    name: of the set; step: of the run; both are in the ids of the episodes. The processes share
    the episodes, and each gets the full report. Raises BudgetExceeded, ServiceUnreachable.
    """
    started = time.monotonic()
    finished = episodes.run(policy, list(enumerate(questions)), step=step, kind=f"{name}-")
    rewarded = list(episodes.collect_rewards(step, finished).values())
    return report_on(rewarded, time.monotonic() - started)


def report_on(episodes: Sequence[Trajectory], seconds: float) -> SearchReport:
    """Return the report of rewarded episodes; its examples are without their ids."""
    values: dict[str, Any] = compute_stats(episodes)
    values |= {key: values.pop(key) for key in _LAST_STATS}
    for kind in ("document", "type"):
        groups = stats_by(kind, episodes)
        values[f"by_{kind}"] = [{kind: name} | stats for name, stats in groups.items()]
    values["seconds"] = seconds
    lines = [episode.model_dump(mode="json", exclude={"tokens"}) for episode in episodes]
    return SearchReport(values, lines)


def read_reports(folder: Path) -> dict[str, list[tuple[int, SearchReport]]]:
    """Return (update, report) of the evaluations in a run's eval.jsonl, by set name."""
    return reports_by_set(folder, read_jsonl(folder / "eval.jsonl"), SearchReport)
