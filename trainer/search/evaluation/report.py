"""Write report.html of a run, evaluation.html of a policy, and comparison.html of two policies.

trainer/runs/evaluation/pages.py has what the tasks share. Pages of episodes with images are
separate (trainer/search/trajectories/view.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from scorekit.paired import PairedStat
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.files import lines_by_set
from trainer.runs.evaluation.pages import (
    TaskPages,
    draw_curves,
    first_and_last,
    group_table,
    read_run,
    set_values,
)
from trainer.runs.stats import compare
from trainer.search.evaluation.stats import changed_most, curves, episodes_of, line_key, table
from trainer.search.records import SUCCESS, Trajectory
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.trajectories.view import write_episodes, write_view

_EXAMPLES = 6  # of each kind
_MAX_EPISODES = 40  # on a page with images
_MAX_GROUPS = 40  # in a table
#: The stats in the table of all evaluations of a run.
_TABLE_STATS = (
    "reward_mean",
    "ndcg_mean",
    "judge_mean",
    "success_share",
    "turns_mean",
    "invalid_share",
)
_PAGES = TaskPages(
    macros="trainer/search/evaluation/macros.html",
    units="questions",
    answer="episode",
    values={"success": SUCCESS},
)


def write_report(
    run_dir: str | Path, title: str = "Search training", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` and the pages of episodes into a run directory, and return its path.

    notes: paragraphs for the top of the page. Raises UserError if the folder has no run.
    """
    folder = Path(run_dir)
    updates, evals = read_run(folder)
    sets = lines_by_set(evals)
    return _PAGES.write_run(
        folder,
        updates,
        [_of_set(folder, name, lines) for name, lines in sets.items()],
        curves=draw_curves(curves(), updates, sets),
        title=title,
        notes=notes,
        trained=_training_page(folder),
        spent=_spent(updates),
    )


def _of_set(folder: Path, name: str, evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of a held-out set, before and after training."""
    first, last = map(episodes_of, first_and_last(folder, evals, "questions", line_key))
    examples = changed_most(first, last, _EXAMPLES) if len(evals) > 1 else []
    page = folder / ("episodes.html" if name == DEFAULT_EVAL_SET else f"episodes-{name}.html")
    title = f"held-out episodes after update {evals[-1]['update']}"
    return set_values(name, evals, table(), examples) | {
        "each": _evaluation_rows(evals),
        "types": _group_table(evals[0], evals[-1], "type"),
        "documents": _group_table(evals[0], evals[-1], "document"),
        "page": _episodes_page(page, folder, last, title),
    }


def _evaluation_rows(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the template values of the table of all evaluations of a set."""
    stats = [replace(stat, hidden_at=()) for stat in table() if stat.key in _TABLE_STATS]
    rows = [(line["update"], [row.before for row in compare(stats, line, {})]) for line in evals]
    return {"titles": [stat.title for stat in stats], "rows": rows}


def _spent(updates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about the run's usage of paid servers."""
    last = updates[-1] if updates else {}
    lines = []
    for server in ("generator", "judge"):
        calls, money = last.get(f"cost/{server}_calls"), last.get(f"cost/{server}_money")
        if calls:
            lines.append(f"{server}: {calls:,.0f} calls" + (f", {money:.4f}" if money else ""))
    return lines


def _training_page(folder: Path) -> str | None:
    """Write the page of the training episodes; None if none are stored."""
    if (
        not (folder / FOLDER / "store.json").is_file()
        or not TrajectoryStore(folder / FOLDER).steps()
    ):
        return None
    return write_view(folder).name


def _episodes_page(path: Path, run: Path, episodes: Sequence[Trajectory], title: str) -> str | None:
    """Write a page of episodes of a run with images; None if there are none."""
    if not episodes or not (run / FOLDER / "store.json").is_file():
        return None
    store = TrajectoryStore(run / FOLDER)
    subset = episodes[:_MAX_EPISODES]
    write_episodes(
        path, subset, store.read_image, title=f"{store.run}: {title}", total=len(episodes)
    )
    return path.name


def write_evaluation(
    path: Path,
    policy: str,
    stats: Mapping[str, Any],
    episodes: Sequence[Trajectory],
    config: str = "",
) -> Path:
    """Write a page of the stats of an evaluation, its worst and its first episodes."""
    rewarded = [episode for episode in episodes if episode.reward_value is not None]
    unfounded = [e for e in episodes if e.success and not e.answer_has_evidence]
    kinds = (
        ("Worst by the reward", sorted(rewarded, key=attrgetter("reward_value"))),
        ("Right without evidence", unfounded),
        ("Gold shown, not sent to the generator", [e for e in episodes if e.has_unsent_gold]),
        ("Without a reward", [e for e in episodes if e.reward_value is None]),
        ("The first of the set", list(episodes)),
    )
    return _PAGES.write_evaluation(
        path,
        policy,
        stats,
        table(),
        [(title, group[:_EXAMPLES]) for title, group in kinds],
        types=_group_table(stats, stats, "type"),
        documents=_group_table(stats, stats, "document"),
        page="evaluation/view.html",
        config=config,
    )


def write_comparison(
    path: Path,
    names: tuple[str, str],
    groups: Mapping[str, Sequence[PairedStat]],
    first: Sequence[Trajectory],
    second: Sequence[Trajectory],
) -> Path:
    """Write a page of the differences with their intervals, and of the greatest changes."""
    return _PAGES.write_comparison(path, names, groups, changed_most(first, second, _EXAMPLES))


def _group_table(
    before: Mapping[str, Any], after: Mapping[str, Any], kind: str
) -> dict[str, Any] | None:
    """Return the template values of a table by "type" or "document", largest groups first.

    None for a single group. left: number of groups that are not in the table.
    """
    old, new = (
        {row[kind]: row for row in stats.get(f"by_{kind}") or ()} for stats in (before, after)
    )
    if not old:
        return None
    rows = [*old.values(), *new.values()]
    stats = [
        stat
        for stat in table()
        if stat.by_group and any(row.get(stat.key) is not None for row in rows)
    ]
    largest = sorted(old, key=lambda name: -old[name]["samples"])[:_MAX_GROUPS]
    largest_groups = group_table(stats, {name: old[name] for name in largest}, new)
    return largest_groups | {"kind": kind, "left": len(old) - len(largest)}
