"""The pages: report.html of a run, evaluation.html of a policy, comparison.html of two; and beside
the first two the pages of their episodes with pictures (trainer/search/trajectories/view.py).

A page is one file, with no script and nothing fetched from elsewhere; every text in it is escaped.
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
from trainer.runs.config import THE_SET
from trainer.runs.figures import Figure, compare
from trainer.runs.runlog import read_jsonl
from trainer.runs.verbs.curves import draw_curves
from trainer.runs.verbs.paired import FEWEST, RESAMPLES, PairedFigure, as_row
from trainer.search.evaluation.compare import ALL, asked, changed_most
from trainer.search.evaluation.figures import curves, table
from trainer.search.records import SUCCESS, Trajectory
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.trajectories.view import write_episodes, write_view

_EXAMPLES = 6  # of each kind, in words
_PICTURED = 40  # on a page of episodes with pictures
_GROUPS_SHOWN = 40  # documents in a table
#: What of each evaluation of a run stands in one table.
_EACH = ("reward_mean", "ndcg_mean", "judge_mean", "success_share", "turns_mean", "invalid_share")
_COSTS = {"generator": "generator", "judge": "judge"}


def write_report(
    run_dir: str | Path, title: str = "Search training", notes: Sequence[str] = ()
) -> Path:
    """Write `report.html` into a run's folder, the pages of its episodes beside it, and return its
    path.

    notes: paragraphs for the top of the page. Raises UserError where no run stands in the folder.
    """
    folder = Path(run_dir)
    updates, evals = read_jsonl(folder / "log.jsonl"), read_jsonl(folder / "eval.jsonl")
    if not updates and not evals:
        raise UserError(f"{folder}: no run here (no log.jsonl, no eval.jsonl)")
    sets: dict[str, list[dict[str, Any]]] = {}
    for line in evals:
        sets.setdefault(line.get("set", THE_SET), []).append(line)
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
    """For the template: a set of held-out questions, before and after."""
    first, last = (read_episodes(folder / evals[place]["completions"]) for place in (0, -1))
    if [asked(one) for one in first] != [asked(one) for one in last]:
        raise UserError(f"{folder}: its first and last evaluation are of other questions")
    examples = changed_most(first, last, _EXAMPLES) if len(evals) > 1 else []
    page = folder / ("episodes.html" if name == THE_SET else f"episodes-{name}.html")
    told = f"held-out episodes after update {evals[-1]['update']}"
    return {
        "name": "" if name == THE_SET else name,
        "decides": evals[-1].get("decides"),
        "last": evals[-1],
        "rows": compare(table(), evals[0], evals[-1]),
        "each": _each(evals),
        "types": group_table(evals[0], evals[-1], "type"),
        "documents": group_table(evals[0], evals[-1], "document"),
        "examples": examples,
        "page": _episodes_page(page, folder, last, told),
    }


def _each(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For the template: some figures of every evaluation of a set."""
    some = [_always(figure) for figure in table() if figure.key in _EACH]
    rows = [(line["update"], [row.before for row in compare(some, line, {})]) for line in evals]
    return {"titles": [figure.title for figure in some], "rows": rows}


def _spent(updates: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the run has asked of paid servers, in words."""
    last = updates[-1] if updates else {}
    told = []
    for server, name in _COSTS.items():
        calls, money = last.get(f"cost/{server}_calls"), last.get(f"cost/{server}_money")
        if calls:
            told.append(f"{name}: {calls:,.0f} calls" + (f", {money:.4f}" if money else ""))
    return told


def _training_page(folder: Path) -> str | None:
    """The page of the run's own episodes; None where none are stored."""
    if (
        not (folder / FOLDER / "store.json").is_file()
        or not TrajectoryStore(folder / FOLDER).steps()
    ):
        return None
    return write_view(folder).name


def _episodes_page(path: Path, run: Path, episodes: Sequence[Trajectory], told: str) -> str | None:
    """The page of some episodes of a run with their pictures; None where there are none."""
    if not episodes or not (run / FOLDER / "store.json").is_file():
        return None
    store = TrajectoryStore(run / FOLDER)
    some = episodes[:_PICTURED]
    write_episodes(path, some, store.picture, title=f"{store.run}: {told}", total=len(episodes))
    return path.name


def write_evaluation(
    path: Path,
    policy: str,
    figures: Mapping[str, Any],
    episodes: Sequence[Trajectory],
    config: str = "",
) -> Path:
    """Write a page of the figures of an evaluation, its worst episodes and its first."""
    ranked = [
        (one.reward.value, one) for one in episodes if one.reward and one.reward.value is not None
    ]
    ranked.sort(key=lambda pair: pair[0])
    kinds = (
        ("Worst by the reward", [one for _, one in ranked[:_EXAMPLES]]),
        (
            "Right without evidence",
            [one for one in episodes if one.success and not one.saw_evidence],
        ),
        (
            "Without a reward",
            [one for one in episodes if not one.reward or one.reward.value is None],
        ),
        ("The first of the set", list(episodes)),
    )
    return _write(
        path,
        "evaluation",
        policy=policy,
        figures=figures,
        rows=compare(table(), figures, {}),
        types=group_table(figures, figures, "type"),
        documents=group_table(figures, figures, "document"),
        examples=[(title, of[:_EXAMPLES]) for title, of in kinds if of],
        page="evaluation/view.html",
        config=config,
    )


def write_comparison(
    path: Path,
    names: tuple[str, str],
    groups: Mapping[str, Sequence[PairedFigure]],
    first: Sequence[Trajectory],
    second: Sequence[Trajectory],
) -> Path:
    """Write a page of the intervals of the differences, and of what changed most."""
    return _write(
        path,
        "comparison",
        first=names[0],
        second=names[1],
        groups=[(name, [as_row(figure) for figure in of]) for name, of in groups.items()],
        whole=ALL,
        resamples=RESAMPLES,
        fewest=FEWEST,
        examples=changed_most(first, second, _EXAMPLES),
    )


def group_table(
    before: Mapping[str, Any], after: Mapping[str, Any], kind: str
) -> dict[str, Any] | None:
    """For the template: figures by "type" or "document", before and after, the largest groups
    first; None of one group. left: groups that are not shown."""
    old, new = ({row[kind]: row for row in of.get(f"by_{kind}") or ()} for of in (before, after))
    if not old:
        return None
    some = [_always(figure) for figure in table() if figure.by_group]
    shown = [figure for figure in some if _known(figure.key, old, new)]
    order = sorted(old, key=lambda name: -old[name]["samples"])
    rows = [
        {
            "name": name,
            "samples": old[name]["samples"],
            "cells": compare(shown, old[name], new.get(name, {})),
        }
        for name in order[:_GROUPS_SHOWN]
    ]
    titles = [figure.title for figure in shown]
    return {"kind": kind, "titles": titles, "rows": rows, "left": len(order) - len(rows)}


def _always(figure: Figure) -> Figure:
    """In its column, also where it is not known."""
    return replace(figure, hidden_at=())


def _known(key: str, *groups: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(row.get(key) is not None for of in groups for row in of.values())


def read_episodes(path: Path) -> list[Trajectory]:
    """The episodes of an evaluation's dump."""
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
