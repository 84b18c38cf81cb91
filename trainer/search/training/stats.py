"""Compute the stats of an update for the log: rewards, groups, and search behavior."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.runs.stats import Stats
from trainer.search.evaluation.stats import compute_stats
from trainer.search.records import Trajectory
from trainer.search.reward.stats import group_rewards, step_stats


def update_stats(final: Mapping[str, Trajectory]) -> Stats:
    """Return the stats of an update: `step_stats`, `compute_stats`, groups without spread."""
    stats = {**step_stats(final), **compute_stats(list(final.values()))}
    return stats | {"groups_without_spread": len(without_spread(final))}


def without_spread(final: Mapping[str, Trajectory]) -> set[str]:
    """Return the groups with equal rewards or with fewer than two rewards: they teach nothing."""
    return {
        group for group, rewards in group_rewards(final).items() if len(set(rewards.values())) < 2
    }
