"""Compare two policies on the same questions: paired differences with bootstrap intervals.

They are of all questions, by document, and by type of question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scorekit.paired import (
    PairedStat,
    indices_by_group,
    largest_changes,
)
from trainer.runs.stats import compare_lines
from trainer.search.evaluation.episode_values import VALUES, values_of
from trainer.search.evaluation.stats import group_names, table
from trainer.search.records import Trajectory

Pair = tuple[Trajectory, Trajectory]
ALL = "all"


def compare_episodes(
    first: Sequence[Trajectory], second: Sequence[Trajectory]
) -> dict[str, list[PairedStat]]:
    """Return the stats of all questions under ALL, and some of them by type and document.

    Keys of groups are "type table" or "document sales.pdf"; a kind with episode group is left out.
    first, second: an episode of each question, in the same order. Raises ValueError for different
    questions.
    """
    keys = [[(t.question.id, t.question.question) for t in side] for side in (first, second)]
    if keys[0] != keys[1]:
        raise ValueError("the two evaluations do not have the same questions in the same order")
    lines = [(values_of(a), values_of(b)) for a, b in zip(first, second, strict=True)]
    group_stats = [stat for stat in table() if stat.by_group]
    indices_by_name = {ALL: list(range(len(lines)))}
    for kind in ("type", "document"):
        groups = indices_by_group(group_names(first, kind))
        indices_by_name |= {f"{kind} {name}": indices for name, indices in groups.items()}
    return {
        name: compare_lines(
            table() if name == ALL else group_stats,
            [lines[index][0] for index in indices],
            [lines[index][1] for index in indices],
        )
        for name, indices in indices_by_name.items()
    }


def episodes_of(lines: Iterable[Mapping[str, Any]]) -> list[Trajectory]:
    """Return the examples of a report, or the lines of a dump, as episodes."""
    return [Trajectory.model_validate(line) for line in lines]


def line_key(line: Mapping[str, Any]) -> tuple[str, str]:
    """Return id and text of the question of an episode, from its line of a dump."""
    return line["question"]["id"], line["question"]["question"]


def changed_most(
    first: Sequence[Trajectory], second: Sequence[Trajectory], max_pairs: int
) -> list[tuple[str, list[Pair]]]:
    """Return (title, pairs of episodes): the greatest gains, the greatest losses, the first pairs.

    They are by reward, or by NDCG if no question has two rewards. max_pairs: max pairs of each.
    """
    all_pairs = list(zip(first, second, strict=True))
    first_ones = ("The first of the set", all_pairs[:max_pairs])
    for name, key in (("the reward", "reward_mean"), ("NDCG", "ndcg_mean")):
        changed = largest_changes(all_pairs, VALUES[key], f", says {name}", max_pairs)
        if changed is not None:
            return [*changed, first_ones]
    return [first_ones] if all_pairs else []
