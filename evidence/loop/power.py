"""Say how many seeds would show what budgets and rare successes may give.

    python -m evidence.loop.power     # a table of docs/explanation/evidence/loop.md

The spread of a difference between two arms is that of the seeds that were run, three of each. So
the numbers are rough: a deviation of three seeds may be half or twice the true one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.common import RESULTS, markdown_table, write_between
from evidence.gain.report import needed
from evidence.seeds import PAGES, seed_interval
from scorekit.command import run_command

PAGE = PAGES / "loop.md"
BEGIN = "<!-- written by `python -m evidence.loop.power` -->"
END = "<!-- end of what is written on power -->"
#: Gains in reward for which the table says how many seeds would show them.
EFFECTS = (0.02, 0.05, 0.1)
#: File of results -> the comparisons of it: title, first arm, second arm.
COMPARISONS = {
    "budgets": [
        ("a budget a row, less equal budgets", "budget", "equal"),
        ("online budgets, less equal budgets", "online", "equal"),
    ],
    "rare": [
        ("SFT on rare successes, less random ones", "rare", "random"),
        ("SFT on rare successes, less none", "rare", "none"),
    ],
}


def differences(
    measurements: Sequence[Mapping[str, Any]], first: str, second: str, set_name: str = "final_test"
) -> list[float]:
    """Return first - second by seed, in reward on a set."""
    by_name = {m["question"]: m["details"].get("seeds") for m in measurements}
    arms = (by_name[f"{set_name}: reward, {arm}"] for arm in (first, second))
    return [a - b for a, b in zip(*arms, strict=True)]


def rows_of(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[list[str]]:
    """Yield the row of each comparison. results: the measurements of each file of COMPARISONS."""
    for name, pairs in COMPARISONS.items():
        for title, first, second in pairs:
            values = differences(results[name], first, second)
            deviation = statistics.stdev(values)
            seeds = (str(needed(deviation, effect)) for effect in EFFECTS)
            interval = seed_interval(values).as_text()
            yield [title, interval, str(len(values)), f"{deviation:.3f}", *seeds]


def table() -> str:
    """Return the table of the page, in Markdown."""
    results = {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]
        for name in COMPARISONS
    }
    head = ["reward on final_test", "mean of the seeds [95 %]", "seeds", "deviation of a seed"]
    return markdown_table([*head, *(f"+{e:g}: seeds" for e in EFFECTS)], list(rows_of(results)))


def main() -> None:
    """Write the table, and print it."""
    print(table())
    write_between(BEGIN, END, table(), PAGE)


if __name__ == "__main__":
    run_command(main, stdout="log")
