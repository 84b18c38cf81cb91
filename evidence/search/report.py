"""Writes the tables and the chart of the page of evidence on search from the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from demo.search.measured_sets import SETS
from evidence.search.arms import CONTROL
from evidence.seeds import PAGES, Changes, cell, seeds_table, seeds_verdict
from scorekit.report.page import chart_image

PAGE = PAGES / "search.md"
PICTURE = PAGES / "search.svg"
BEGIN = "<!-- written by `python -m evidence.search --report` -->"
END = "<!-- end of what is written on search -->"
TITLE = "NDCG in training, mean of the seeds"
#: Arms of the picture.
_COLOURS = {
    "both": "C2",
    "ndcg": "C0",
    "judge": "C1",
    "ppo": "C4",
    "shuffled": "C7",
    "rows": "C3",
    "random": "C5",
}
#: Column of the tables -> figure and digits.
COLUMNS = {
    "reward": ("reward_mean", 3),
    "NDCG": ("ndcg_mean", 3),
    "judge": ("judge_mean", 3),
    "without evidence": ("success_without_evidence_share", 3),
    "gold seen": ("gold_seen_share", 3),
    "turns": ("turns_mean", 2),
    "searches": ("searches_mean", 2),
    "crops": ("crops_mean", 2),
    "invalid": ("invalid_mean", 2),
    "forced": ("forced_share", 3),
}
#: Columns of the sets behind the first.
FEWER = ("reward", "NDCG", "judge", "gold seen", "turns", "searches", "forced")
#: Figures with an interval over seeds. The page has a table of the first.
SEED_FIGURES = {"reward": "reward_mean", "NDCG": "ndcg_mean"}
#: Figures whose changes are told with an interval over questions.
CHANGED = ("reward", "NDCG")
MAIN_START = "start-warm-nothing"
STARTS = {
    MAIN_START: "the start",
    "start-random-nothing": "random weights",
    "start-warm-half": "the start, the generator knows half",
}

Results = Mapping[str, Any]


def show(results: Results) -> None:
    """Print the tables on the terminal, and more than the page has.

    The last lines summarize each set.
    """
    parts = [tables(results)]
    control = _title(results, CONTROL) if CONTROL in results["arms"] else ""
    for number, (name, set_results) in enumerate(results["sets"].items()):
        parts += seed_parts(results, set_results, SETS[name].title, "NDCG", control)
        if number:
            parts += [f"### Changes on {SETS[name].title}, questions as the unit [95 %]"]
            parts += [changes_table(results, set_results)]
        parts += [f"### Why turns were invalid on {SETS[name].title}"]
        parts += [invalid_table(results, set_results)]
    parts += ["### What training had nothing to learn from", flat_table(results)]
    Console(width=160).print(Markdown("\n\n".join([*parts, *verdicts(results)])))


def write_page(results: Results) -> None:
    """Put tables and picture into docs/explanation/evidence/search.md."""
    body = tables(results)
    svg = picture_of(results)
    if svg is not None:
        PICTURE.write_text(svg, encoding="utf-8")
        body += f"\n\n![{TITLE}]({PICTURE.name})"
    write_between(BEGIN, END, body, PAGE)


def picture_of(results: Results) -> str | None:
    """Return the training curves as SVG."""
    return chart_image(TITLE, "update", partial(_curves, results["arms"]))


def tables(results: Results) -> str:
    """Return the tables of the page in Markdown: those of the final test first, then the main ones
    of the other sets.
    """
    parts = [f"{results['updates']} updates a run. Commit `{results['machine']['commit']}`."]
    control = _title(results, CONTROL) if CONTROL in results["arms"] else ""
    for number, (name, set_results) in enumerate(results["sets"].items()):
        title = SETS[name].title
        parts += [
            f"### What each policy does on {title}",
            f"{set_results['questions']} questions about "
            f"{len(set_results['documents'])} documents, "
            f"{set_results['episodes']} episodes a policy. The mean of the seeds.",
            ends_table(results, set_results, main_only=number > 0),
        ]
        parts += seed_parts(results, set_results, title, "reward", control)
        if not number:
            parts += [f"### Changes on {title}, questions as the unit [95 %]"]
            parts += [changes_table(results, set_results)]
    return "\n\n".join(parts)


def seed_parts(
    results: Results, set_results: Results, title: str, name: str, control: str
) -> list[str]:
    """Return a heading and a table of the control and the arms with several seeds.

    An empty list if no arm has several, or if the control is missing.
    """
    arms = changes_of(results, set_results, SEED_FIGURES[name])
    if all(len(changes) < 2 for changes in arms.values()):
        return []
    several = {arm: c for arm, c in arms.items() if len(c) > 1 or arm == control}
    heading = f"### {name} on {title}: change from the start, seeds as the unit"
    return [heading, seeds_table(several, control)]


def verdicts(results: Results) -> list[str]:
    """Return a sentence on each set and stat, from the tables of seeds."""
    return [
        seeds_verdict(f"{name} on {SETS[set_name].title}", arms, _title(results, CONTROL))
        for set_name, set_results in results["sets"].items()
        for name, key in SEED_FIGURES.items()
        if (arms := changes_of(results, set_results, key))
    ]


def changes_of(results: Results, set_results: Results, key: str) -> dict[str, Changes]:
    """Return title of an arm -> its change of a stat by seed; empty if the control is missing."""
    if CONTROL not in set_results["arms"]:
        return {}
    return {
        _title(results, name): {
            seed: changes[key]
            for seed, changes in zip(arm["seeds"], arm["of_seeds"], strict=True)
            if changes[key] is not None
        }
        for name, arm in set_results["arms"].items()
    }


def ends_table(results: Results, set_results: Results, *, main_only: bool = False) -> str:
    """Return a table of the stats before and after training on a set, over all seeds.

    All rows are measured with the same settings.
    main_only: leave out some columns, arms with one seed, and the other starts.
    """
    columns = FEWER if main_only else tuple(COLUMNS)
    rows = [
        [STARTS[name], "", *_cells(stats, columns)]
        for name, stats in set_results["starts"].items()
        if name == MAIN_START or (name in STARTS and not main_only)
    ]
    for name, arm in set_results["arms"].items():
        if main_only and len(arm["seeds"]) < 2:
            continue
        rows.append([_title(results, name), str(len(arm["seeds"])), *_cells(arm["end"], columns)])
    return markdown_table(["", "seeds", *columns], rows)


def changes_table(results: Results, set_results: Results) -> str:
    """Return a table of each arm's changes from its start, and its reward less that of `both`.

    The trained policies are held fixed, and the questions are drawn anew.
    """
    rows = []
    for name, arm in set_results["arms"].items():
        cells = [_with_interval(arm["changes"][COLUMNS[key][0]]) for key in CHANGED]
        less = arm.get("against_both")
        cells.append(_with_interval(less["reward_mean"]) if less else "")
        rows.append([_title(results, name), *cells])
    both = "reward at the end, less *both rewards*"
    return markdown_table(["", *(f"{key}, from the start" for key in CHANGED), both], rows)


def flat_table(results: Results) -> str:
    """Return the share of an update's groups whose episodes all have the same reward."""
    rows = []
    for arm in results["arms"].values():
        means = [fmean(run) for run in arm["logged"]["groups_without_spread"] if run]
        rows.append([arm["title"], cell(fmean(means) if means else None, 1)])
    return markdown_table(["", "groups without spread, an update"], rows)


def invalid_table(results: Results, set_results: Results) -> str:
    """Return a table of invalid turns per hundred episodes, by reason."""
    count = set_results["episodes"]
    rows_of = {STARTS[name]: (stats, count) for name, stats in set_results["starts"].items()}
    rows_of |= {
        _title(results, name): (arm["end"], count * len(arm["seeds"]))
        for name, arm in set_results["arms"].items()
    }
    reasons = sorted({reason for stats, _ in rows_of.values() for reason in stats["invalid"]})
    rows = [
        [title, *(cell(100 * stats["invalid"].get(reason, 0) / count, 1) for reason in reasons)]
        for title, (stats, count) in rows_of.items()
    ]
    return markdown_table(["of 100 episodes", *(f"`{reason}`" for reason in reasons)], rows)


def _title(results: Results, name: str) -> str:
    return str(results["arms"][name]["title"])


def _cells(stats: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    return [cell(stats[key], digits) for key, digits in (COLUMNS[name] for name in columns)]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _with_interval(change: Mapping[str, Any]) -> str:
    if change["interval"] is None:
        return _signed(change["change"])
    low, high = change["interval"]
    return f"{change['change']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _curves(arms: Mapping[str, Any], axes: Any) -> int:
    """Draw one line per arm, with space for the names to the right; return how many."""
    shown_arms = [name for name in arms if name in _COLOURS]
    updates = 0
    for name in shown_arms:
        runs = [run for run in arms[name]["logged"]["ndcg_mean"] if None not in run]
        means = [sum(values) / len(values) for values in zip(*runs, strict=False)]
        axes.plot(range(1, len(means) + 1), means, color=_COLOURS[name], label=arms[name]["title"])
        updates = max(updates, len(means))
    axes.set_xlim(0, 2 * updates + 1)
    axes.set_xticks(range(0, updates + 1, max(1, updates // 4)))
    return len(shown_arms)
