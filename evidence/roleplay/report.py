"""Writes the tables and the chart of the page of evidence on role-play from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import ROOT
from evidence.roleplay.arms import ALL, ARMS, UNSEEN_NAMES
from evidence.seeds import (
    PICTURES,
    Changes,
    cell,
    markdown_table,
    seeds_table,
    seeds_verdict,
    write_between,
)
from scorekit.report.page import chart_image

PICTURE = PICTURES / "roleplay.svg"
BEGIN = "<!-- written by `python -m evidence.roleplay --report` -->"
END = "<!-- end of what is written on role-play -->"
TITLE = "reward of the sampled replies, by update"
_COLOURS = {"all": "C2", "shuffled": "C7"}

Run = dict[str, Any]


def show(results: dict[str, Any]) -> None:
    """Print the tables on the terminal."""
    Console(width=160).print(Markdown(tables(results)))


def write_page(results: dict[str, Any]) -> None:
    """Put tables and picture into docs/explanation/evidence/translation.md."""
    body = tables(results)
    svg = chart_image(TITLE, "update", partial(_curves, results["runs"]))
    if svg is not None:
        PICTURE.write_text(svg, encoding="utf-8")
        body += f"\n\n![{TITLE}](evidence/{PICTURE.name})"
    write_between(BEGIN, END, body)


def tables(results: dict[str, Any]) -> str:
    """Return all tables, in Markdown."""
    parts = [
        f"Held out: {results['turns']} turns of `demo/data/roleplay/final_test.jsonl`; commit "
        f"`{results['machine']['commit']}`.",
        "### Each reward, held out",
        rewards_table(results),
        "### What no reward looks at",
        others_table(results),
        "### Changes from the start, with the standard error of the paired difference",
        changes_table(results),
        f"### On names that are in no training (`{UNSEEN_NAMES.relative_to(ROOT)}`)",
        names_table(results),
        "### The first turns of the set, as they were answered",
        examples_table(results),
        *seed_parts(results["runs"]),
    ]
    return "\n\n".join(parts)


def seed_parts(runs: Sequence[Run]) -> list[str]:
    """Return tables and sentences with seeds as the unit; an empty list without the control."""
    names = [name for name in ARMS if any(run["arm"] == name for run in runs)]
    control = ARMS["shuffled"].title
    if "shuffled" not in names:
        return []
    parts, verdicts = [], []
    for title, key, digits in (("weighted sum", "reward", 3), ("chrF", "chrf", 1)):
        arms: dict[str, Changes] = {
            ARMS[name].title: {
                run["seed"]: run["changes"][key]["change"] for run in runs if run["arm"] == name
            }
            for name in names
        }
        parts += [f"### {title}: change from the start, seeds as the unit"]
        parts += [seeds_table(arms, control, digits=digits)]
        verdicts.append(seeds_verdict(title, arms, control))
    return [*parts, "### What the seeds show", *verdicts]


def rewards_table(results: dict[str, Any]) -> str:
    """Return the five functions and their sum by the table's weights."""
    names = ["reward", *results["weights"]]
    head = ["", "seed", "weighted sum", *(f"`{name}`" for name in names[1:]), "of it: name, level"]

    def cells(stats: dict[str, Any]) -> list[str]:
        components = f"{cell(stats['character/name'], 2)}, {cell(stats['character/speech'], 2)}"
        return [*(cell(stats[name], 3) for name in names), components]

    return markdown_table(head, _rows(results, cells))


def others_table(results: dict[str, Any]) -> str:
    """Return stats that show how a policy could exploit a reward."""
    keys = {
        "chrF to the reference": ("chrf", 1),
        "copied from the user": ("copied_user", 3),
        "copied from the reference": ("copied_reference", 3),
        "said again": ("repeated", 3),
        "distinct": ("distinct", 2),
        "narrations, names apart": ("narrations", 0),
        "characters": ("characters", 1),
        "not ended": ("clipped_ratio", 2),
        "KL to the start, a token": ("kl_start", 3),
    }

    def cells(stats: dict[str, Any]) -> list[str]:
        return [cell(stats[key], digits) for key, digits in keys.values()]

    return markdown_table(["", "seed", *keys], _rows(results, cells))


def changes_table(results: dict[str, Any]) -> str:
    """Return every run against the start, turn by turn."""
    names = ["reward", *results["weights"], "chrf"]
    head = ["", "seed", "weighted sum", *(f"`{name}`" for name in names[1:-1]), "chrF"]
    rows = []
    for run in results["runs"]:
        changes = [run["changes"][name] for name in names]
        digits = [3] * (len(names) - 1) + [1]
        rows.append(
            [
                ARMS[run["arm"]].title,
                str(run["seed"]),
                *(
                    f"{change['change']:+.{d}f} ± {change['standard_error']:.{d}f}"
                    for change, d in zip(changes, digits, strict=True)
                ),
            ]
        )
    return markdown_table(head, rows)


def names_table(results: dict[str, Any]) -> str:
    """Return the start, and the runs with all functions."""
    rows = [
        [
            "after SFT (the start)" if run["seed"] is None else ARMS[ALL].title,
            str(run["seed"] or ""),
            *(cell(run["end"][key], 2) for key in ("character/name", "character/speech")),
            *(cell(run["end"][key], 3) for key in ("reward_format", "reward")),
        ]
        for run in results["unseen_names"]
    ]
    head = ["", "seed", "name", "level", "`reward_format`", "weighted sum"]
    return markdown_table(head, rows)


def examples_table(results: dict[str, Any]) -> str:
    """Return a table with one column per turn."""
    examples = results["examples"]
    names = [name for name in ("hurt", "start", *ARMS) if name in examples[0]]
    titles = {"hurt": "as it comes", "start": "after SFT (the start)"}
    headers = [
        f"{_text(example['user'])} ({example['character']}, {example['level']})"
        for example in examples
    ]
    rows = [["reference", *(_text(example["reference"]) for example in examples)]]
    for name in names:
        title = titles.get(name) or ARMS[name].title
        rows.append([title, *(_text(example[name]) for example in examples)])
    return markdown_table(["", *headers], rows)


def _rows(results: dict[str, Any], cells: Any) -> list[list[str]]:
    first = [
        ["as it comes", "", *cells(results["hurt"])],
        ["after SFT (the start)", "", *cells(results["start"])],
    ]
    return first + [
        [ARMS[run["arm"]].title, str(run["seed"]), *cells(run["end"])] for run in results["runs"]
    ]


def _text(text: str) -> str:
    """Return a text for a table cell: no line breaks, no bars, no markup."""
    cleaned = text.replace("\ufffd", "").replace("\n", " / ")
    for mark in "\\|<>*_`":
        cleaned = cleaned.replace(mark, f"\\{mark}")
    return cleaned


def _curves(runs: Sequence[Run], axes: Any) -> int:
    """Draw one line per run, one color per arm, for arms whose rewards have all weights; return
    how many.
    """
    shown_runs = [run for run in runs if run["arm"] in _COLOURS]
    named: set[str] = set()
    for run in shown_runs:
        label = None if run["arm"] in named else ARMS[run["arm"]].title
        named.add(run["arm"])
        values = run["training_reward"]
        axes.plot(range(1, len(values) + 1), values, color=_COLOURS[run["arm"]], label=label)
    return len(shown_runs)
