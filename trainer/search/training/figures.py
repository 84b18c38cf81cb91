"""What an update of a searcher says in the log: of rewards, groups, and how it searched."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.runs.figures import Figures
from trainer.search.evaluation.figures import figures_of
from trainer.search.records import Trajectory
from trainer.search.reward.figures import group_rewards, step_figures


def update_figures(final: Mapping[str, Trajectory]) -> Figures:
    """Of all episodes of an update: `step_figures`, `figures_of`, and the groups that teach
    nothing."""
    found = {**step_figures(final), **figures_of(list(final.values()))}
    return found | {"groups_without_spread": len(without_spread(final))}


def without_spread(final: Mapping[str, Trajectory]) -> set[str]:
    """The groups whose episodes all earned the same, or in which fewer than two have a reward:
    there is nothing to compare."""
    return {
        group for group, rewards in group_rewards(final).items() if len(set(rewards.values())) < 2
    }
