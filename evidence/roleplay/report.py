"""Writes the tables and the chart of the page of evidence on role-play from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.common import ROOT, markdown_table, write_between
from evidence.roleplay.arms import ALL, ARMS, UNSEEN_NAMES
from evidence.seeds import PAGES, Changes, seeds_table, seeds_verdict, spread, wrapped
from scorekit.report.page import chart_image

PAGE = PAGES / "roleplay.md"
PICTURE = PAGES / "roleplay.svg"
BEGIN = "<!-- written by `python -m evidence.roleplay --report` -->"
END = "<!-- end of what is written on role-play -->"
TITLE = "reward of the sampled replies, by update"
#: Arms that every table has.
MAIN = (ALL, "shuffled")
#: Turns whose replies are shown.
SHOWN_TURNS = 3
_COLOURS = {"all": "C2", "shuffled": "C7"}

Run = dict[str, Any]


def show(results: dict[str, Any]) -> None:
    """Print the tables on the terminal, and more than the page has.

    The last lines say what the seeds show.
    """
    parts = [tables(results), "### Changes from the start, in paired standard errors"]
    text = "\n\n".join([*parts, changes_table(results), *verdicts(results["runs"])])
    Console(width=160).print(Markdown(text))


def write_page(results: dict[str, Any]) -> None:
    """Put tables and picture into docs/explanation/evidence/roleplay.md."""
    body = tables(results)
    svg = chart_image(TITLE, "update", partial(_curves, results["runs"]))
    if svg is not None:
        PICTURE.write_text(svg, encoding="utf-8")
        body += f"\n\n![{TITLE}]({PICTURE.name})"
    write_between(BEGIN, END, body, PAGE)


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the page, in Markdown."""
    parts = [
        wrapped(
            f"Held out: {results['turns']} turns of `demo/data/roleplay/final_test.jsonl`. Commit "
            f"`{results['machine']['commit']}`. Two numbers in a cell are the lowest and the "
            "highest of the seeds."
        ),
        *seed_tables(results["runs"]),
        "### Each reward, held out",
        rewards_table(results),
        "### What no reward looks at",
        others_table(results),
        f"### On names that are in no training (`{UNSEEN_NAMES.relative_to(ROOT)}`)",
        names_table(results),
        "### The first turns of the set, as they were answered",
        examples_table(results),
    ]
    return "\n\n".join(parts)


def seed_tables(runs: Sequence[Run]) -> list[str]:
    """Return the tables with seeds as the unit; an empty list without the control."""
    parts = []
    for title, digits, arms in _changes(runs):
        parts += [f"### {title}: change from the start, seeds as the unit"]
        parts += [seeds_table(arms, ARMS["shuffled"].title, digits=digits)]
    return parts


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each stat with seeds as the unit; an empty list without the control."""
    control = ARMS["shuffled"].title
    return [seeds_verdict(title, arms, control) for title, _, arms in _changes(runs)]


def _changes(runs: Sequence[Run]) -> list[tuple[str, int, dict[str, Changes]]]:
    """Return title and digits of each stat, and the changes of each arm."""
    by_arm = _by_arm(runs)
    if "shuffled" not in by_arm:
        return []
    return [
        (
            title,
            digits,
            {
                ARMS[name].title: {run["seed"]: run["changes"][key]["change"] for run in arm_runs}
                for name, arm_runs in by_arm.items()
            },
        )
        for title, key, digits in (("weighted sum", "reward", 3), ("chrF", "chrf", 1))
    ]


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each arm that has any, in the order of the arms."""
    by_arm = {name: [run for run in runs if run["arm"] == name] for name in ARMS}
    return {name: arm_runs for name, arm_runs in by_arm.items() if arm_runs}


def rewards_table(results: dict[str, Any]) -> str:
    """Return the five functions and their sum by the table's weights, and two parts of one."""
    names = ["reward", *results["weights"], "character/name", "character/speech"]
    head = ["", "weighted sum", *(f"`{name}`" for name in results["weights"])]
    digits = [3] * (len(names) - 2) + [2, 2]
    rows = _rows(results, dict(zip(names, digits, strict=True)))
    return markdown_table([*head, "of it: name", "of it: level"], rows)


def others_table(results: dict[str, Any]) -> str:
    """Return stats of the main arms that show how a policy could exploit a reward."""
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
    return markdown_table(["", *keys], _rows(results, dict(keys.values()), MAIN))


def changes_table(results: dict[str, Any]) -> str:
    """Return the changes of the main arms in standard errors of the differences, turn by turn."""
    names = ["reward", *results["weights"], "chrf"]
    head = ["", "weighted sum", *(f"`{name}`" for name in names[1:-1]), "chrF"]
    rows = []
    by_arm = _by_arm(results["runs"])
    for arm in [name for name in MAIN if name in by_arm]:
        runs = by_arm[arm]
        changes = [[run["changes"][name] for run in runs] for name in names]
        cells = [[c["change"] / c["standard_error"] for c in of_seeds] for of_seeds in changes]
        rows.append([ARMS[arm].title, *(spread(values, 1, signs=True) for values in cells)])
    return markdown_table(head, rows)


def names_table(results: dict[str, Any]) -> str:
    """Return the start, and the runs with all functions."""
    keys = {"character/name": 2, "character/speech": 2, "reward_format": 3, "reward": 3}
    starts = [run["end"] for run in results["unseen_names"] if run["seed"] is None]
    ends = [run["end"] for run in results["unseen_names"] if run["seed"] is not None]
    rows = [
        [title, *(spread([stats[key] for stats in many], digits) for key, digits in keys.items())]
        for title, many in (("after SFT (the start)", starts), (ARMS[ALL].title, ends))
    ]
    return markdown_table(["", "name", "level", "`reward_format`", "weighted sum"], rows)


def examples_table(results: dict[str, Any]) -> str:
    """Return a table with one column per turn: the reference, the start, and two arms."""
    examples = results["examples"][:SHOWN_TURNS]
    names = [name for name in ("start", *MAIN) if name in examples[0]]
    headers = [
        f"{_text(example['user'])} ({example['character']}, {example['level']})"
        for example in examples
    ]
    rows = [["reference", *(_text(example["reference"]) for example in examples)]]
    for name in names:
        title = "after SFT (the start)" if name == "start" else ARMS[name].title
        rows.append([title, *(_text(example[name]) for example in examples)])
    return markdown_table(["", *headers], rows)


def _rows(
    results: dict[str, Any], digits: dict[str, int], arms: Sequence[str] = tuple(ARMS)
) -> list[list[str]]:
    """Return a row for each start and each of the arms.

    digits: by the key of a stat.
    """
    stats_of = {"as it comes": [results["hurt"]], "after SFT (the start)": [results["start"]]}
    for name, runs in _by_arm(results["runs"]).items():
        if name in arms:
            stats_of[ARMS[name].title] = [run["end"] for run in runs]
    return [
        [title, *(spread([stats[key] for stats in many], d) for key, d in digits.items())]
        for title, many in stats_of.items()
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
