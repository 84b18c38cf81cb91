"""Write report.html of a run, evaluation.html of a policy, and comparison.html of two policies.

Pages of episodes with images are separate (trainer/search/trajectories/view.py). A page is one file
without scripts, and it loads nothing; all text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.report.page import STYLE
from scorekit.report.render import visible
from trainer.runs.cli.curves import draw_curves
from trainer.runs.cli.paired import FEWEST, RESAMPLES, PairedStat, as_row
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import StatSpec, compare
from trainer.search.evaluation.compare import ALL, changed_most, question_key
from trainer.search.evaluation.stats import curves, table
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
_COSTS = {"generator": "generator", "judge": "judge"}


def write_report(
    run_dir: str | Path, title: str = "Search training", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` and the pages of episodes into a run directory, and return its path.

    notes: paragraphs for the top of the page. Raises UserError if the folder has no run.
    """
    folder = Path(run_dir)
    updates, evals = read_jsonl(folder / "log.jsonl"), read_jsonl(folder / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{folder}: not a run directory (no log.jsonl, no eval.jsonl)")
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in evals:
        sets.setdefault(line.get("set", DEFAULT_EVAL_SET), []).append(line)
    return _write(
        folder / "report.html",
        "report",
        title=title,
        notes=notes,
        stopped=updates[-1].get("stopped") if updates else None,
        sets=[_of_set(folder, name, lines) for name, lines in sets.items()],
        trained=_training_page(folder),
        spent=_spent(updates),
        curves=[Markup(svg) for svg in draw_curves(curves(), updates, sets)],
        config=_read_text(folder / "config.yaml"),
        updates=len(updates),
    )


def _of_set(folder: Path, name: str, evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template values of a held-out set, before and after training."""
    first, last = (read_episodes(folder / evals[index]["completions"]) for index in (0, -1))
    if [question_key(episode) for episode in first] != [question_key(episode) for episode in last]:
        raise UserError(f"{folder}: its first and last evaluation have different questions")
    examples = changed_most(first, last, _EXAMPLES) if len(evals) > 1 else []
    page = folder / ("episodes.html" if name == DEFAULT_EVAL_SET else f"episodes-{name}.html")
    title = f"held-out episodes after update {evals[-1]['update']}"
    return {
        "name": "" if name == DEFAULT_EVAL_SET else name,
        "decides": evals[-1].get("decides"),
        "last": evals[-1],
        "rows": compare(table(), evals[0], evals[-1]),
        "each": _evaluation_rows(evals),
        "types": group_table(evals[0], evals[-1], "type"),
        "documents": group_table(evals[0], evals[-1], "document"),
        "examples": examples,
        "page": _episodes_page(page, folder, last, title),
    }


def _evaluation_rows(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the template values of the table of all evaluations of a set."""
    stats = [_always(stat) for stat in table() if stat.key in _TABLE_STATS]
    rows = [(line["update"], [row.before for row in compare(stats, line, {})]) for line in evals]
    return {"titles": [stat.title for stat in stats], "rows": rows}


def _spent(updates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about the run's usage of paid servers."""
    last = updates[-1] if updates else {}
    lines = []
    for server, name in _COSTS.items():
        calls, money = last.get(f"cost/{server}_calls"), last.get(f"cost/{server}_money")
        if calls:
            lines.append(f"{name}: {calls:,.0f} calls" + (f", {money:.4f}" if money else ""))
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
    ranked = [
        (episode.reward.value, episode)
        for episode in episodes
        if episode.reward and episode.reward.value is not None
    ]
    ranked.sort(key=lambda pair: pair[0])
    kinds = (
        ("Worst by the reward", [episode for _, episode in ranked[:_EXAMPLES]]),
        (
            "Right without evidence",
            [episode for episode in episodes if episode.success and not episode.saw_evidence],
        ),
        (
            "Without a reward",
            [episode for episode in episodes if not episode.reward or episode.reward.value is None],
        ),
        ("The first of the set", list(episodes)),
    )
    return _write(
        path,
        "evaluation",
        policy=policy,
        figures=stats,
        rows=compare(table(), stats, {}),
        types=group_table(stats, stats, "type"),
        documents=group_table(stats, stats, "document"),
        examples=[(title, group[:_EXAMPLES]) for title, group in kinds if group],
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
    return _write(
        path,
        "comparison",
        first=names[0],
        second=names[1],
        groups=[(name, [as_row(stat) for stat in group]) for name, group in groups.items()],
        whole=ALL,
        resamples=RESAMPLES,
        fewest=FEWEST,
        examples=changed_most(first, second, _EXAMPLES),
    )


def group_table(
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
    group_stats = [_always(stat) for stat in table() if stat.by_group]
    visible_stats = [stat for stat in group_stats if _is_present(stat.key, old, new)]
    order = sorted(old, key=lambda name: -old[name]["samples"])
    rows = [
        {
            "name": name,
            "samples": old[name]["samples"],
            "cells": compare(visible_stats, old[name], new.get(name, {})),
        }
        for name in order[:_MAX_GROUPS]
    ]
    titles = [stat.title for stat in visible_stats]
    return {"kind": kind, "titles": titles, "rows": rows, "left": len(order) - len(rows)}


def _always(stat: StatSpec) -> StatSpec:
    """Return a stat whose column also shows missing values."""
    return replace(stat, hidden_at=())


def _is_present(key: str, *groups: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(row.get(key) is not None for group in groups for row in group.values())


def read_episodes(path: Path) -> list[Trajectory]:
    """Return the episodes in a file of an evaluation."""
    return [Trajectory.model_validate(line) for line in read_jsonl(path)]


def _write(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder."""
    environment = Environment(
        loader=PackageLoader("trainer.search.evaluation", "."),
        autoescape=select_autoescape(["html"]),
    )
    environment.filters["visible"] = visible
    page = environment.get_template(f"{template}.html").render(
        style=Markup(STYLE), success=SUCCESS, **values
    )
    write_atomic(path, page)
    return path


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
