"""Computes the figures of the phases from their files, and writes them into their page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import markdown_table, write_between
from demo.search.measured_sets import SETS
from evidence.phases.runs import ARMS, START, Plan
from evidence.seeds import PAGES, SeedInterval, against, cell, seed_interval, seeds_verdict
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import mean_of

PAGE = PAGES / "phases.md"
BEGIN = "<!-- written by `python -m evidence.phases --report` -->"
END = "<!-- end of what is written on phases -->"
SMALL_PRINT = "small print"
#: Column of the tables -> key of a figure.
FIGURES = {
    "NDCG": "ndcg",
    "judge": "judge",
    "small print": "small_print",
    "crops": "crops",
    "own ends": "own_ends",
    "turns": "turns",
    "searches": "searches",
    "invalid": "invalid",
}
#: Phase -> columns whose changes are told with an interval.
CHANGED = {
    1: ("NDCG", "own ends", "judge"),
    2: ("judge", "small print", "crops", "own ends", "NDCG"),
}

Line = Mapping[str, Any]
Results = Mapping[str, Any]


def figures_of(lines: Sequence[Line]) -> dict[str, float | None]:
    """Return the figures of a measurement: means over its questions.

    small_print: the judge's score of the questions of small print. own_ends: the share of episodes
    that the policy ended itself.
    """

    def mean(key: str, rows: Sequence[Line] = lines) -> float | None:
        return mean_of([line[key] for line in rows if line[key] is not None])

    small = [line for line in lines if line["type"] == SMALL_PRINT]
    return {
        "ndcg": mean("ndcg_mean"),
        "judge": mean("judge_mean"),
        "small_print": mean("judge_mean", small),
        "crops": mean("crops_mean"),
        "own_ends": mean_of([float(line["end"] == "complete") for line in lines]),
        "turns": mean("turns_mean"),
        "searches": mean("searches_mean"),
        "invalid": mean("invalid_mean"),
    }


def summarise(plan: Plan) -> dict[str, Any]:
    """Return the figures of all measured runs: by set and arm, one for each seed."""
    return {
        "sets": {
            set_name: {
                name: {
                    str(seed): figures_of(read_jsonl(path))
                    for seed in (plan.seeds if name != START else plan.seeds[:1])
                    if (path := plan.measured(name, seed, set_name)).is_file()
                }
                for name in (START, *ARMS)
            }
            for set_name in plan.sets
        }
    }


def changes_of(by_arm: Results, name: str, key: str) -> dict[int, float]:
    """Return seed -> change of a figure from what the arm began with."""
    start = ARMS[name].start
    changes = {}
    for seed, stats in by_arm[name].items():
        first = by_arm[start].get(seed) or next(iter(by_arm[start].values()))
        if stats[key] is not None and first[key] is not None:
            changes[int(seed)] = stats[key] - first[key]
    return changes


def phases_of(by_arm: Results, column: str, phase: int) -> dict[str, dict[int, float]]:
    """Return title -> changes of a phase and then of its control; empty without both."""
    names = [name for name, arm in ARMS.items() if arm.phase == phase]
    names.sort(key=lambda name: ARMS[name].dealt is not None)
    changes = {ARMS[name].title: changes_of(by_arm, name, FIGURES[column]) for name in names}
    return changes if all(changes.values()) else {}


def tables(results: Results) -> str:
    """Return all tables in Markdown, those of the final test first."""
    parts = [f"Commit `{results['machine']['commit']}`."]
    for set_name, by_arm in results["sets"].items():
        title = SETS[set_name].title
        parts += [f"### What each phase leaves, on {title}", ends_table(by_arm)]
        parts += [f"### What each phase changes on {title}, seeds as the unit"]
        parts += [changes_table(by_arm)]
    return "\n\n".join(parts)


def verdicts(results: Results) -> list[str]:
    """Return a sentence on each set, phase and figure."""
    sentences = []
    for set_name, by_arm in results["sets"].items():
        for phase, columns in CHANGED.items():
            for column in columns:
                if changes := phases_of(by_arm, column, phase):
                    name = f"phase {phase}: {column} on {SETS[set_name].title}"
                    sentences.append(seeds_verdict(name, changes, list(changes)[-1]))
    return sentences


def changes_table(by_arm: Results) -> str:
    """Return a table of the changes of each phase, beside its control's."""
    rows = []
    for phase, columns in CHANGED.items():
        for column in columns:
            if changes := phases_of(by_arm, column, phase):
                rewarded, control = changes.values()
                less = against(rewarded, control)
                rows.append(
                    [
                        f"phase {phase}: {column}",
                        _by_seed(rewarded),
                        _interval(seed_interval(list(rewarded.values()))),
                        _by_seed(control),
                        "" if less is None else _interval(less),
                    ]
                )
    head = ["", "change, seed by seed", "mean of the seeds [95 %]", "the control's change"]
    return markdown_table([*head, "less the control, paired by seed [95 %]"], rows)


def _by_seed(changes: Mapping[int, float]) -> str:
    return ", ".join(f"{changes[seed]:+.3f}" for seed in sorted(changes))


def _interval(interval: SeedInterval) -> str:
    return interval.as_text() + (": clear of 0" if interval.is_clear else "")


def ends_table(by_arm: Results) -> str:
    """Return a table of the figures that each arm leaves, the mean of its seeds."""
    rows = []
    for name, by_seed in by_arm.items():
        values = list(by_seed.values())
        means = [
            mean_of([v[key] for v in values if v[key] is not None]) for key in FIGURES.values()
        ]
        title = "as it comes" if name == START else ARMS[name].title
        if values:
            rows.append([title, str(len(values)), *(cell(mean, 3) for mean in means)])
    return markdown_table(["", "seeds", *FIGURES], rows)


def show(results: Results) -> None:
    """Print the tables; the last lines say what the seeds show."""
    text = "\n\n".join([tables(results), *verdicts(results)])
    Console(width=160).print(Markdown(text))


def write_page(results: Results) -> None:
    """Put the tables into docs/explanation/evidence/phases.md."""
    write_between(BEGIN, END, tables(results), PAGE)
